//! Every example runs to its end and says what it promises.
//!
//! `cargo test` builds the examples before it runs this. `cargo test --test examples` alone does
//! not: run `cargo build --examples` first, with the same features and profile.

use std::path::PathBuf;
use std::process::Command;

/// Examples are built next to the directory of the test binaries.
fn binary(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().expect("a test knows its binary");
    path.pop();
    if path.ends_with("deps") {
        path.pop();
    }
    path.push("examples");
    path.push(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(
        path.exists(),
        "{} is not there: run `cargo build --examples`",
        path.display()
    );
    path
}

/// Runs an example, and expects each of these lines in its output, in any order.
fn expect(name: &str, lines: &[&str]) {
    let output = Command::new(binary(name)).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let wrote = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name}: {}\n{said}{wrote}",
        output.status
    );
    for line in lines {
        assert!(
            said.lines().any(|found| found == *line),
            "{name} did not say {line:?}, but:\n{said}{wrote}"
        );
    }
}

#[test]
fn hello() {
    expect("hello", &["hello world (attempt 1)", "handlers run: 1"]);
}

#[test]
fn layers() {
    let lines = [
        "charge, attempt 1: done (in time: true)",
        "charge, attempt 1: a charge of nothing (in time: true)",
        "dead: charge: a charge of nothing",
        "ready: true",
        "3 runs, 0 unsettled",
        "in the till: 1500 cents",
    ];
    expect("layers", &lines);
}

#[test]
fn trait_handler() {
    let lines = [
        "me@example.org -> a@example.org from queue outgoing",
        "bounced by d@example.org",
        "incoming: 1 completed, 0 buried",
        "outgoing: 1 completed, 1 buried",
    ];
    expect("trait_handler", &lines);
}

#[test]
fn retries() {
    let lines = [
        "granted 12 = completed 3 + retried 6 + surrendered 1 + buried 2",
        "dead after 1 failures: 410: gone",
        "dead after 4 failures: 500: internal error",
    ];
    expect("retries", &lines);
}

#[test]
fn long_job() {
    let lines = [
        "revoked 1 lease",
        "resumed at row 10, saved under an older token",
        "granted 2, revoked 1, completed 1, fenced calls 1",
    ];
    expect("long_job", &lines);
}

#[test]
fn graceful_shutdown() {
    let lines = [
        "short: done",
        "polite: draining true",
        "finished 3, unsettled 0",
        "completed 1, surrendered 2, expired 0, ready again 2",
    ];
    expect("graceful_shutdown", &lines);
}

#[test]
fn exclusive_keys() {
    let lines = [
        "the second report is a duplicate of the first",
        "most of one account at once: 1",
        "accounts ran beside each other: true",
        "order for ann: [1, 2, 3, 4]",
    ];
    expect("exclusive_keys", &lines);
}

#[test]
fn embedding() {
    let lines = [
        "202 accepted",
        "hello ann, hello bob, hello cid",
        "drained, 0 unsettled",
    ];
    expect("embedding", &lines);
}

#[test]
fn observer() {
    let lines = [
        "expired: kind render owner doomed task deploy-1 cause deadline last progress 40 \
         expiries 1 now ready",
        "settled: complete at attempt 2",
        "released 1, expired 1",
    ];
    expect("observer", &lines);
}

#[test]
#[cfg(unix)]
fn april_incident() {
    let lines = [
        "no fence: thawed before its successor wrote: 2 stored, 1 lost",
        "no fence: thawed after its successor wrote: 2 stored, 1 lost",
        "token checked on writes only: thawed before its successor wrote: 2 stored, 1 lost",
        "token checked on writes only: thawed after its successor wrote: 1 stored, 0 lost",
        "leasehold's fence: thawed before its successor wrote: 1 stored, 0 lost",
        "leasehold's fence: thawed after its successor wrote: 1 stored, 0 lost",
    ];
    expect("april_incident", &lines);
}

#[test]
#[cfg(unix)]
fn service() {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpStream;
    use std::process::Stdio;
    use std::sync::mpsc::RecvTimeoutError;

    let mut service = Command::new(binary("service"));
    let service = service.stdout(Stdio::piped()).env_remove("LEASEHOLD_URL");
    let mut service = service.spawn().expect("it starts");
    let out = BufReader::new(service.stdout.take().expect("it is piped"));
    let mut lines = out.lines().map(|line| line.expect("a line"));
    let mut next = |start: &str| loop {
        let line = lines.next().expect("it goes on");
        if let Some(rest) = line.strip_prefix(start) {
            return rest.to_owned();
        }
    };
    let at = next("listening on http://");
    next("hello world");
    for path in ["/healthz", "/readyz", "/leases", "/leases/metrics"] {
        let mut asked = TcpStream::connect(&at).expect("it listens");
        write!(asked, "GET {path} HTTP/1.0\r\nHost: {at}\r\n\r\n").expect("it reads");
        let mut answer = String::new();
        asked.read_to_string(&mut answer).expect("it answers");
        assert!(answer.starts_with("HTTP/1.0 200 OK"), "{path}: {answer}");
    }
    // Half a request, whose other half never comes: a graceful shutdown alone waits for it.
    let mut half = TcpStream::connect(&at).expect("it listens");
    let head = format!("GET /healthz HTTP/1.1\r\nHost: {at}\r\n");
    half.write_all(head.as_bytes()).expect("it reads");
    std::thread::sleep(std::time::Duration::from_millis(200));
    let begun = std::time::Instant::now();
    let pid = rustix::process::Pid::from_child(&service);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is there");
    let (gone, ended) = std::sync::mpsc::channel::<()>();
    let patience = std::thread::spawn(move || {
        // A supervisor's: it would send SIGKILL now.
        let patience = std::time::Duration::from_secs(30);
        let in_time = ended.recv_timeout(patience) != Err(RecvTimeoutError::Timeout);
        drop(half);
        in_time
    });
    assert_eq!(next("unsettled: "), "0");
    assert!(service.wait().expect("it ends").success());
    drop(gone);
    let in_time = patience.join().expect("it ends");
    assert!(in_time, "{:?}", begun.elapsed());
}
