//! Hearing what is published: a wake-up is a word on a channel.
//!
//! What is said while nobody listens is lost, so a listener only shortens a sleep that would end by
//! itself. It does not mend itself: when it fails, the sleeper looks for work, and listens anew.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::dial::Dialer;
use super::fault::explain;
use crate::error::Result;

/// How often a silent connection is asked whether it still is one.
const PULSE: Duration = Duration::from_secs(5);

/// A subscription to one channel.
pub(crate) struct Listener {
    pushes: UnboundedReceiver<PushInfo>,
    connection: MultiplexedConnection,
}

impl Listener {
    pub(super) async fn new(dialer: &Dialer, channel: &str) -> Result<Self> {
        let (say, pushes) = unbounded_channel();
        let mut connection = dialer.listening(&say).await?;
        let subscribed = connection.subscribe(channel).await;
        subscribed.map_err(|error| explain(&error))?;
        Ok(Self { pushes, connection })
    }

    /// The next word; none when the connection is gone. May be dropped and called again: nothing is
    /// lost by that.
    pub(crate) async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let Ok(push) = tokio::time::timeout(PULSE, self.pushes.recv()).await else {
                let ping = redis::cmd("PING");
                self.connection.send_packed_command(&ping).await.ok()?;
                continue;
            };
            let push = push?;
            match (push.kind, push.data.into_iter().nth(1)) {
                (PushKind::Disconnection, _) => return None,
                (PushKind::Message, Some(Value::BulkString(word))) => return Some(word),
                _ => {}
            }
        }
    }
}
