//! A proxy that misbehaves on demand, between a client and its server.
//!
//! Its mode can be changed at any time and holds for connections that are already open. It knows
//! where a request ends, so it can let a certain one through and lose its reply.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// What becomes of what passes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Pass,
    /// Each piece waits this long, in both directions.
    Delay(Duration),
    /// Nothing arrives anywhere, and no connection ends: a cut cable.
    Drop,
    /// Requests get lost, replies still come.
    DropRequests,
    /// Requests arrive, replies get lost.
    DropReplies,
    /// Every open connection is reset, and every new one at once.
    Reset,
    /// The server sees its clients hang up; the clients see nothing, and are never answered.
    HalfOpen,
    /// New connections are closed at once; open ones live on.
    Refuse,
}

/// What clients and server speak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Speech {
    /// Redis.
    Resp,
    /// PostgreSQL, not encrypted.
    Postgres,
}

/// A running proxy. It ends, with its connections, when it is dropped.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    listener: AbortHandle,
}

struct Shared {
    speech: Speech,
    mode: watch::Sender<Mode>,
    plan: Mutex<Plan>,
    requests: AtomicUsize,
    lost: AtomicUsize,
    connections: AtomicUsize,
}

/// Which requests lose their reply: so many pass first, then so many are hit.
#[derive(Clone, Copy, Default)]
struct Plan {
    pass: usize,
    hit: usize,
}

impl Proxy {
    /// A proxy before the Redis server on a port of this machine.
    pub async fn start(port: u16) -> Self {
        Self::speaking(Speech::Resp, port).await
    }

    /// A proxy before the server on a port of this machine.
    pub async fn speaking(speech: Speech, port: u16) -> Self {
        let shared = Arc::new(Shared {
            speech,
            mode: watch::Sender::new(Mode::Pass),
            plan: Mutex::default(),
            requests: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        Self::before(port, shared).await
    }

    /// One more, before another server: mode, plan and counts are shared.
    pub async fn beside(&self, port: u16) -> Self {
        Self::before(port, Arc::clone(&self.shared)).await
    }

    async fn before(port: u16, shared: Arc<Shared>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = SocketAddr::from(([127, 0, 0, 1], port));
        let accepting = tokio::spawn(accept(listener, server, Arc::clone(&shared)));
        Self {
            address,
            shared,
            listener: accepting.abort_handle(),
        }
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// From now on, for every connection.
    pub fn set(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
    }

    /// Lets the next `pass` requests through, then forwards each of `hit` more, waits for its
    /// reply, and closes the connection instead of passing the reply on: the server did it, and the
    /// client cannot know.
    pub fn lose_replies(&self, pass: usize, hit: usize) {
        *self.shared.plan.lock().unwrap() = Plan { pass, hit };
    }

    /// Requests that the server was sent.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Replies that were lost by plan.
    pub fn lost(&self) -> usize {
        self.shared.lost.load(Ordering::SeqCst)
    }

    /// Connections that were accepted.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, shared: Arc<Shared>) {
    // The connections end with the set, and the set with this task.
    let mut connections = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        shared.connections.fetch_add(1, Ordering::SeqCst);
        let mode = *shared.mode.borrow();
        match mode {
            Mode::Reset => reset(&client),
            Mode::Refuse => drop(client),
            _ => {
                let shared = Arc::clone(&shared);
                connections.spawn(serve(client, server, shared));
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Closing without lingering sends RST instead of FIN.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

async fn serve(client: TcpStream, server: SocketAddr, shared: Arc<Shared>) {
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let mut mode = shared.mode.subscribe();
    let (from_client, mut to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    let mut line = Line {
        shared: &shared,
        requests: Frames::of_requests(shared.speech),
        replies: Frames::of_replies(shared.speech),
        sent: 0,
        answered: 0,
        doomed: None,
    };
    let resetting = mode.wait_for(|mode| *mode == Mode::Reset);
    tokio::select! {
        () = line.run(&from_client, &mut to_client, &from_server, &mut to_server) => {}
        _ = resetting => {
            let client = from_client.reunite(to_client);
            if let Ok(client) = client { reset(&client) }
            return;
        }
    }
    if *shared.mode.borrow() == Mode::HalfOpen {
        // The server's side is closed; the client's stays, and is silent, until the mode changes.
        drop((from_server, to_server));
        let mut mode = shared.mode.subscribe();
        let _ = mode.wait_for(|mode| *mode != Mode::HalfOpen).await;
    }
}

/// One connection.
struct Line<'a> {
    shared: &'a Shared,
    requests: Frames,
    replies: Frames,
    /// Requests and replies that went through it.
    sent: usize,
    answered: usize,
    /// The number of the request whose reply will be lost.
    doomed: Option<usize>,
}

impl Line<'_> {
    /// Until either side hangs up, a reply is lost, or the line falls half open.
    async fn run(
        &mut self,
        from_client: &OwnedReadHalf,
        to_client: &mut OwnedWriteHalf,
        from_server: &OwnedReadHalf,
        to_server: &mut OwnedWriteHalf,
    ) {
        let mut mode = self.shared.mode.subscribe();
        let (mut asked, mut said) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        // A stream that has lost something in its midst cannot go on: its ends would give up on it.
        let mut torn = false;
        loop {
            let now = *mode.borrow_and_update();
            let losing = matches!(now, Mode::DropRequests | Mode::DropReplies);
            if now == Mode::HalfOpen || (torn && !losing) {
                return;
            }
            // What is not read piles up with the sender, like behind a cut cable.
            let hears_client = now != Mode::Drop;
            let hears_server = now != Mode::Drop;
            tokio::select! {
                changed = mode.changed() => if changed.is_err() { return },
                ready = from_client.readable(), if hears_client => {
                    let Ok(()) = ready else { return };
                    let Some(n) = read(from_client, &mut asked) else { return };
                    torn |= now == Mode::DropRequests;
                    if now == Mode::DropRequests { continue }
                    if let Mode::Delay(by) = now { tokio::time::sleep(by).await }
                    let due = self.admit(&asked[..n]);
                    if to_server.write_all(&asked[..due]).await.is_err() { return }
                }
                ready = from_server.readable(), if hears_server => {
                    let Ok(()) = ready else { return };
                    let Some(n) = read(from_server, &mut said) else { return };
                    if let Mode::Delay(by) = now { tokio::time::sleep(by).await }
                    let (due, lost) = self.answer(&said[..n]);
                    torn |= now == Mode::DropReplies;
                    if now != Mode::DropReplies
                        && to_client.write_all(&said[..due]).await.is_err() { return }
                    if lost {
                        self.shared.lost.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                }
            }
        }
    }

    /// How much of what a client sent may go to the server. What comes behind a doomed request may
    /// not: its reply would be lost with the connection, by nobody's plan.
    fn admit(&mut self, bytes: &[u8]) -> usize {
        if self.doomed.is_some() {
            return 0;
        }
        let mut at = 0;
        while let Some(end) = self.requests.next_end(&bytes[at..]) {
            at += end;
            self.sent += 1;
            self.shared.requests.fetch_add(1, Ordering::SeqCst);
            let mut plan = self.shared.plan.lock().unwrap();
            if plan.pass > 0 {
                plan.pass -= 1;
            } else if plan.hit > 0 {
                plan.hit -= 1;
                self.doomed = Some(self.sent);
                return at;
            }
        }
        bytes.len()
    }

    /// How much of what a server sent may go to the client, and whether the doomed reply has come.
    fn answer(&mut self, bytes: &[u8]) -> (usize, bool) {
        let (mut at, mut whole) = (0, 0);
        while let Some(end) = self.replies.next_end(&bytes[at..]) {
            at += end;
            self.answered += 1;
            if self.doomed == Some(self.answered) {
                return (whole, true);
            }
            whole = at;
        }
        // The beginning of the doomed reply is kept back, too.
        if self.doomed == Some(self.answered + 1) {
            return (whole, false);
        }
        (bytes.len(), false)
    }
}

/// Reads what is there. None: the other side has hung up.
fn read(from: &OwnedReadHalf, buffer: &mut [u8]) -> Option<usize> {
    match from.try_read(buffer) {
        Ok(0) => None,
        Ok(n) => Some(n),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Some(0),
        Err(_) => None,
    }
}

/// Finds the ends of requests or replies in a stream of bytes.
enum Frames {
    Resp(Values),
    Postgres(Messages),
}

impl Frames {
    fn of_requests(speech: Speech) -> Self {
        match speech {
            Speech::Resp => Self::Resp(Values::default()),
            // A simple query, or the end of what belongs together.
            Speech::Postgres => Self::Postgres(Messages::new(false, b"QS")),
        }
    }

    fn of_replies(speech: Speech) -> Self {
        match speech {
            Speech::Resp => Self::Resp(Values::default()),
            // The server is ready for the next.
            Speech::Postgres => Self::Postgres(Messages::new(true, b"Z")),
        }
    }

    /// How many of these bytes complete what is under way; none if they do not.
    fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Resp(values) => values.next_end(bytes),
            Self::Postgres(messages) => messages.next_end(bytes),
        }
    }
}

/// PostgreSQL's messages: a letter, a length that counts itself, and the rest.
struct Messages {
    /// The first message of a client has no letter, and is answered like a request.
    begun: bool,
    /// Letters of messages that end a request, or a reply.
    last: &'static [u8],
    head: Vec<u8>,
    /// Bytes of the message that are still to come.
    rest: usize,
    is_last: bool,
}

impl Messages {
    fn new(begun: bool, last: &'static [u8]) -> Self {
        Self {
            begun,
            last,
            head: Vec::new(),
            rest: 0,
            is_last: false,
        }
    }

    fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if self.rest > 0 {
                let n = self.rest.min(bytes.len() - at);
                (self.rest, at) = (self.rest - n, at + n);
            } else {
                self.head.push(bytes[at]);
                at += 1;
                if !self.head_done() {
                    continue;
                }
            }
            if self.rest == 0 && std::mem::take(&mut self.is_last) {
                return Some(at);
            }
        }
        None
    }

    fn head_done(&mut self) -> bool {
        let letters = usize::from(self.begun);
        let Some((length, [])) = self
            .head
            .get(letters..)
            .and_then(|rest| rest.split_first_chunk())
        else {
            return false;
        };
        self.rest = u32::from_be_bytes(*length) as usize - length.len();
        self.is_last = !self.begun || self.last.contains(&self.head[0]);
        self.begun = true;
        self.head.clear();
        true
    }
}

/// Finds the ends of RESP values in a stream of bytes.
#[derive(Default)]
struct Values {
    /// Values that are still to come before the outermost is complete.
    open: usize,
    begun: bool,
    /// Bytes of a bulk string, with its line break, that are still to come.
    bulk: usize,
    line: Vec<u8>,
}

impl Values {
    /// How many of these bytes complete the value that is under way; none if they do not.
    fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if self.bulk > 0 {
                let n = self.bulk.min(bytes.len() - at);
                (self.bulk, at) = (self.bulk - n, at + n);
                if self.bulk == 0 && self.value_done() {
                    return Some(at);
                }
                continue;
            }
            self.line.push(bytes[at]);
            at += 1;
            if self.line.ends_with(b"\r\n") && self.line_done() {
                return Some(at);
            }
        }
        None
    }

    fn line_done(&mut self) -> bool {
        let line = std::mem::take(&mut self.line);
        if !self.begun {
            (self.begun, self.open) = (true, 1);
        }
        let number = std::str::from_utf8(&line[1..line.len() - 2]).ok();
        let number: i64 = number.and_then(|text| text.parse().ok()).unwrap_or(0);
        let inside = usize::try_from(number).unwrap_or(0);
        match line[0] {
            b'$' | b'=' | b'!' if number >= 0 => {
                self.bulk = inside + 2;
                false
            }
            b'*' | b'~' | b'>' => {
                self.open += inside;
                self.value_done()
            }
            b'%' => {
                self.open += 2 * inside;
                self.value_done()
            }
            _ => self.value_done(),
        }
    }

    fn value_done(&mut self) -> bool {
        self.open -= 1;
        let done = self.open == 0;
        self.begun = !done;
        done
    }
}
