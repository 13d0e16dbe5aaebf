//! A plain HTTP client, and nothing that a browser would do by itself.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Nothing here takes this long on any machine.
pub const LONG: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// A port for a server that is to listen on a certain one, or again on the same. As long as this is
/// kept, nobody else is given it: it is bound and does not listen.
pub struct Port {
    _bound: TcpSocket,
    pub at: SocketAddr,
}

impl Port {
    pub fn keep() -> Self {
        let bound = TcpSocket::new_v4().unwrap();
        // Two may be bound to one address if both say so and one of them listens.
        bound.set_reuseaddr(true).unwrap();
        bound.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let at = bound.local_addr().unwrap();
        Self { _bound: bound, at }
    }
}

/// One request on a connection of its own. `headers` are whole lines.
pub async fn send(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &str,
) -> Answer {
    let mut lines = vec![
        format!("{method} {path} HTTP/1.1"),
        "Connection: close".to_owned(),
    ];
    lines.extend(headers.iter().map(|line| (*line).to_owned()));
    if !headers
        .iter()
        .any(|line| line.to_ascii_lowercase().starts_with("host:"))
    {
        lines.push(format!("Host: {to}"));
    }
    if !body.is_empty() {
        lines.push(format!("Content-Length: {}", body.len()));
    }
    raw(
        to,
        format!("{}\r\n\r\n{body}", lines.join("\r\n")).as_bytes(),
    )
    .await
}

pub async fn get(to: SocketAddr, path: &str) -> Answer {
    send(to, "GET", path, &[], "").await
}

/// A form, sent as our own page would send it.
pub async fn post(to: SocketAddr, path: &str, form: &str) -> Answer {
    let headers = [
        "Content-Type: application/x-www-form-urlencoded",
        "Sec-Fetch-Site: same-origin",
    ];
    send(to, "POST", path, &headers, form).await
}

/// Whatever bytes, and the answer to them.
pub async fn raw(to: SocketAddr, bytes: &[u8]) -> Answer {
    let exchange = async {
        let mut stream = TcpStream::connect(to).await.unwrap();
        // The server may answer and hang up before it has read everything.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let mut chunk = vec![0; 16 * 1024];
        while let Ok(read @ 1..) = stream.read(&mut chunk).await {
            answer.extend_from_slice(&chunk[..read]);
            if is_whole(&answer) {
                break;
            }
        }
        answer
    };
    let answer = tokio::time::timeout(LONG, exchange)
        .await
        .expect("no answer");
    parse(&answer)
}

fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, _)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>().ok())?
    });
    length.is_some_and(|length| answer.len() >= head.len() + 4 + length)
}

fn parse(answer: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Answer {
        status: status.unwrap_or(0),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// An open stream of events.
pub struct Events {
    stream: TcpStream,
    seen: String,
}

impl Events {
    pub async fn open(to: SocketAddr, path: &str) -> Self {
        let mut stream = TcpStream::connect(to).await.unwrap();
        let head =
            format!("GET {path} HTTP/1.1\r\nHost: {to}\r\nAccept: text/event-stream\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        Self {
            stream,
            seen: String::new(),
        }
    }

    /// Everything received, once `wanted` is in it.
    pub async fn until(&mut self, wanted: &str) -> &str {
        let read = async {
            let mut chunk = vec![0; 16 * 1024];
            while !self.seen.contains(wanted) {
                match self.stream.read(&mut chunk).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => self.seen += &String::from_utf8_lossy(&chunk[..read]),
                }
            }
        };
        let _ = tokio::time::timeout(LONG, read).await;
        assert!(self.seen.contains(wanted), "no {wanted:?} in the stream");
        &self.seen
    }

    pub fn forget(&mut self) {
        self.seen.clear();
    }
}
