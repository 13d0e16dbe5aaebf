//! What can go wrong between here and the server, and what it is called outside.
//!
//! A call that was sent and not answered may have been applied: `Unavailable`, which is not
//! certain. A refusal is certain only if it came before the first line of a script ran: an error
//! out of the middle of one leaves what stands above that line.

use std::sync::Arc;

use redis::{ErrorKind as Cause, RedisError, ServerErrorKind as Refusal};

use crate::error::{Error, ErrorKind};

/// An error of the server or of the connection, in the words of the crate.
pub(super) fn explain(error: &RedisError) -> Error {
    let (kind, detail) = match error.kind() {
        _ if has_no_functions(error) => (
            ErrorKind::Unsupported,
            "the server has no functions: the store needs Redis 7.0 or later, or Valkey, with the \
             commands FCALL and FUNCTION LOAD under their own names",
        ),
        Cause::Server(refusal) => refused(refusal),
        Cause::Extension => refused_by_code(error.code().unwrap_or_default()),
        Cause::AuthenticationFailed => (
            ErrorKind::Denied,
            "the server does not accept this user and password",
        ),
        Cause::Io if is_certificate(error) => (
            ErrorKind::Denied,
            "the server's certificate is not accepted; check ?ca=FILE, its names and its dates",
        ),
        Cause::Io if error.is_timeout() => {
            (ErrorKind::Unavailable, "the server did not answer in time")
        }
        Cause::Io | Cause::Parse | Cause::ClusterConnectionNotFound => (
            ErrorKind::Unavailable,
            "the connection to the server failed",
        ),
        Cause::MasterNameNotFoundBySentinel => (
            ErrorKind::Unavailable,
            "the sentinels know no primary of that name",
        ),
        Cause::InvalidClientConfig => (
            ErrorKind::InvalidInput,
            "the connection's settings do not fit together",
        ),
        _ => (ErrorKind::Unexpected, "the server's answer makes no sense"),
    };
    let kind = match kind {
        kind if !kind.is_certain() || !is_inside_script(error) => kind,
        kind if kind.is_transient() => ErrorKind::Unavailable,
        _ => ErrorKind::Unexpected,
    };
    Error::new(kind, detail).caused_by(error.clone())
}

fn refused(refusal: Refusal) -> (ErrorKind, &'static str) {
    match refusal {
        Refusal::BusyLoading => (
            ErrorKind::Unavailable,
            "the server is still loading its data",
        ),
        Refusal::ReadOnly => (
            ErrorKind::Unavailable,
            "the server is a replica and takes no writes",
        ),
        Refusal::ClusterDown | Refusal::MasterDown | Refusal::TryAgain => (
            ErrorKind::Unavailable,
            "the primary is down or its slots are on the move",
        ),
        Refusal::Moved | Refusal::Ask => (ErrorKind::Unavailable, "the slot is on another node"),
        Refusal::NoScript => (
            ErrorKind::Unavailable,
            "the server forgets scripts as fast as they are loaded",
        ),
        Refusal::NoPerm => no_rights(),
        _ => (ErrorKind::Unexpected, "the server refused a command"),
    }
}

fn refused_by_code(code: &str) -> (ErrorKind, &'static str) {
    match code {
        "OOM" => (
            ErrorKind::Full,
            "the server has no memory left; raise maxmemory or let the queues drain",
        ),
        "BUSY" => (
            ErrorKind::Contended,
            "another script holds the server for too long",
        ),
        "NOREPLICAS" => (
            ErrorKind::Unavailable,
            "the server has fewer replicas than min-replicas-to-write asks for",
        ),
        "MISCONF" => (
            ErrorKind::Unavailable,
            "the server cannot write its disk and takes no writes",
        ),
        "NOAUTH" | "WRONGPASS" => (
            ErrorKind::Denied,
            "the server does not accept this user and password",
        ),
        "NOPERM" => no_rights(),
        _ => (ErrorKind::Unexpected, "the server refused a command"),
    }
}

fn no_rights() -> (ErrorKind, &'static str) {
    (
        ErrorKind::Denied,
        "the user lacks a right; `leasehold doctor` lists those that are missing",
    )
}

/// Whether the server does not know the commands that functions are loaded and called by.
fn has_no_functions(error: &RedisError) -> bool {
    error.detail().is_some_and(|text| {
        text.contains("unknown command") && (text.contains("FCALL") || text.contains("FUNCTION"))
    })
}

/// The server names the line when a command of a function failed.
fn is_inside_script(error: &RedisError) -> bool {
    error
        .detail()
        .is_some_and(|text| text.contains("@user_script") || text.contains("@user_function"))
}

/// Whether the two sides could not agree on who the server is.
fn is_certificate(error: &RedisError) -> bool {
    type Shared = Arc<dyn std::error::Error + Send + Sync>;
    let tls = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<Shared>())
        .and_then(|source| source.downcast_ref::<std::io::Error>())
        .and_then(std::io::Error::get_ref)
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(
        tls,
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_))
    )
}

/// Whether the connection is of no further use: it is broken, or may be, or leads to a server that
/// is no longer the primary.
pub(super) fn is_broken(error: &RedisError) -> bool {
    match error.kind() {
        Cause::Io
        | Cause::Parse
        | Cause::AuthenticationFailed
        | Cause::ClusterConnectionNotFound
        | Cause::Server(Refusal::ReadOnly) => true,
        Cause::Extension => error.code() == Some("NOAUTH"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a server writes behind the minus sign.
    fn said(line: &str) -> RedisError {
        let line = format!("-{line}\r\n");
        let value = redis::parse_redis_value(line.as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn refusals_have_a_kind_each() {
        use ErrorKind as K;
        for (line, kind) in [
            (
                "LOADING Redis is loading the dataset in memory",
                K::Unavailable,
            ),
            (
                "READONLY You can't write against a read only replica.",
                K::Unavailable,
            ),
            ("CLUSTERDOWN The cluster is down", K::Unavailable),
            ("MASTERDOWN Link with MASTER is down", K::Unavailable),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                K::Unavailable,
            ),
            ("MOVED 1 127.0.0.1:7001", K::Unavailable),
            ("ASK 1 127.0.0.1:7001", K::Unavailable),
            ("NOSCRIPT No matching script.", K::Unavailable),
            (
                "NOREPLICAS Not enough good replicas to write.",
                K::Unavailable,
            ),
            (
                "MISCONF Redis is configured to save RDB snapshots",
                K::Unavailable,
            ),
            ("BUSY Redis is busy running a script.", K::Contended),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                K::Full,
            ),
            (
                "NOPERM this user has no permissions to run the 'evalsha' command",
                K::Denied,
            ),
            ("NOAUTH Authentication required.", K::Denied),
            ("WRONGPASS invalid username-password pair", K::Denied),
            ("ERR unknown command", K::Unexpected),
            (
                "ERR unknown command `FCALL`, with args beginning with: `f`",
                K::Unsupported,
            ),
            (
                "ERR unknown command 'FUNCTION', with args beginning with: 'LOAD'",
                K::Unsupported,
            ),
            (
                "CROSSSLOT Keys in request don't hash to the same slot",
                K::Unexpected,
            ),
        ] {
            assert_eq!(explain(&said(line)).kind(), kind, "{line}");
        }
    }

    #[test]
    fn a_refusal_in_the_middle_of_a_script_is_not_certain() {
        let end = "script: 0123, on @user_script:7.";
        for (line, kind) in [
            ("NOPERM this user has no permissions", ErrorKind::Unexpected),
            ("OOM command not allowed", ErrorKind::Unavailable),
        ] {
            let kind_inside = explain(&said(&format!("{line} {end}"))).kind();
            assert_eq!(kind_inside, kind, "{line}");
            assert!(!kind_inside.is_certain());
            assert!(explain(&said(line)).kind().is_certain());
        }
    }

    #[test]
    fn a_broken_connection_leaves_the_call_unknown() {
        use std::io::ErrorKind as Io;
        for io in [
            Io::TimedOut,
            Io::BrokenPipe,
            Io::ConnectionReset,
            Io::UnexpectedEof,
        ] {
            let error = RedisError::from(std::io::Error::from(io));
            assert!(is_broken(&error), "{io}");
            let kind = explain(&error).kind();
            assert_eq!(kind, ErrorKind::Unavailable);
            assert!(kind.is_transient() && !kind.is_certain());
        }
        assert!(is_broken(&said("READONLY You can't write")));
        assert!(!is_broken(&said("LOADING wait")));
        assert!(!is_broken(&said("OOM full")));
    }
}
