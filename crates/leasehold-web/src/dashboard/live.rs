//! A screen as a stream: its live part is sent again whenever it has changed.
//!
//! Our own [server](crate::server) closes open streams when it ends. Another server in which the
//! router is nested would wait for them. So there a stream shows the screen once and tells the page
//! when to ask again, and no request is kept open.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::mpsc;

use super::page::{Asked, Screen, Trouble, show};
use leasehold::hooks::monotonic;
use leasehold::{Error, ErrorKind};

/// After this a browser is made to come again: whoever has gone unnoticed is let go of.
const LIFE: Duration = Duration::from_secs(600);
/// How long a client may leave what it was sent unread.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a stream that nobody cuts off waits for the store.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn stream(screen: Screen, asked: Asked) -> Response {
    let Ok(permit) = Arc::clone(&asked.app.streams).try_acquire_owned() else {
        let later = [(header::RETRY_AFTER, "10")];
        let why = "too many pages are open\n";
        return (StatusCode::SERVICE_UNAVAILABLE, later, why).into_response();
    };
    let (send, receive) = mpsc::channel::<Event>(1);
    tokio::spawn(async move {
        // Both end with this task, not with the connection: a client that reads nothing holds up
        // neither the others nor its own end.
        let _permit = permit;
        let _busy = asked
            .connection
            .as_ref()
            .map(crate::server::Connection::busy);
        feed(screen, &asked, &send).await;
    });
    let events = stream::unfold(receive, async |mut receive| {
        let event = receive.recv().await?;
        Some((Ok::<_, Infallible>(event), receive))
    });
    Sse::new(events)
        .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
        .into_response()
}

fn silent() -> Error {
    let why = format!("no answer within {STORE_PATIENCE:?}");
    Error::new(ErrorKind::Unavailable, why)
}

async fn feed(screen: Screen, asked: &Asked, send: &mpsc::Sender<Event>) {
    let begun = monotonic();
    let mut last = String::new();
    let again = Event::default().retry(Duration::from_secs(1)).comment("");
    if send.send(again).await.is_err() {
        return;
    }
    let is_cut_off = asked.connection.is_some();
    while begun.elapsed() < LIFE {
        let shown = if is_cut_off {
            show(screen, asked).await
        } else {
            let shown = tokio::time::timeout(STORE_PATIENCE, show(screen, asked)).await;
            shown.unwrap_or_else(|_| Err(Trouble::Store(silent())))
        };
        let event = match shown {
            Ok(shown) => {
                let live = shown.live.into_string();
                let changed = (live != last).then(|| Event::default().event("live").data(&live));
                last = live;
                changed
            }
            Err(trouble) => {
                last.clear();
                let gone = matches!(trouble, Trouble::Missing(_));
                let name = if gone { "gone" } else { "trouble" };
                let words = trouble.words().replace('\r', " ");
                Some(Event::default().event(name).data(words))
            }
        };
        if let Some(event) = event
            && send.send_timeout(event, PATIENCE).await.is_err()
        {
            return;
        }
        if !is_cut_off {
            let wait = asked.app.refresh;
            let again = Event::default().event("again").retry(wait);
            let again = again.data(wait.as_millis().to_string());
            let _ = send.send_timeout(again, PATIENCE).await;
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(asked.app.refresh) => {}
            () = send.closed() => return,
        }
    }
}
