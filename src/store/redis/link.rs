//! The way to the server: one connection for calls, one for each listener.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, IntoConnectionInfo, ProtocolVersion, PushInfo, PushKind,
    RedisError, Value,
};
use tokio::sync::{OnceCell, mpsc};

use super::RedisOptions;
use crate::error::{Error, ErrorKind, Result};

/// A script, known to the server by the hash of its text.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) body: String,
    pub(crate) sha: String,
}

impl Script {
    pub(crate) fn new(name: &'static str, body: impl Into<String>) -> Self {
        let body = body.into();
        let sha = redis::Script::new(&body).get_hash().to_owned();
        Self { name, body, sha }
    }
}

/// A way to the server. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    client: Client,
    /// Pushes need the newer protocol.
    listener: Client,
    connection: std::sync::Arc<OnceCell<MultiplexedConnection>>,
}

impl Link {
    pub(crate) fn open(options: &RedisOptions) -> Result<Self> {
        let info = options
            .url()
            .into_connection_info()
            .map_err(|e| explain(&e))?;
        let settings = info.redis_settings().clone();
        let newer = info
            .clone()
            .set_redis_settings(settings.set_protocol(ProtocolVersion::RESP3));
        Ok(Self {
            client: Client::open(info).map_err(|e| explain(&e))?,
            listener: Client::open(newer).map_err(|e| explain(&e))?,
            connection: std::sync::Arc::default(),
        })
    }

    /// The same server, with a connection of its own on the current runtime.
    #[expect(clippy::unnecessary_wraps, reason = "other ways can fail")]
    pub(crate) fn dedicated(&self) -> Result<Self> {
        Ok(Self {
            client: self.client.clone(),
            listener: self.listener.clone(),
            connection: std::sync::Arc::default(),
        })
    }

    async fn connected(&self) -> Result<MultiplexedConnection> {
        let connect = || async {
            let config =
                AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
            let connected = self
                .client
                .get_multiplexed_async_connection_with_config(&config);
            connected.await.map_err(|e| explain(&e))
        };
        Ok(self.connection.get_or_try_init(connect).await?.clone())
    }

    /// Runs a script on the node of the first key, and loads it where it is not known.
    pub(crate) async fn call(
        &self,
        script: &Script,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Result<Value> {
        loop {
            let mut command = redis::cmd("EVALSHA");
            command.arg(&script.sha).arg(keys.len()).arg(keys).arg(args);
            let mut connection = self.connected().await?;
            let answer = connection.send_packed_command(&command).await;
            match answer.and_then(Value::extract_error) {
                Err(error) if error.code() == Some("NOSCRIPT") => {
                    tracing::debug!(script = script.name, "loading a script");
                    let mut load = redis::cmd("SCRIPT");
                    load.arg("LOAD").arg(&script.body);
                    self.run(b"", load).await?;
                }
                answer => return answer.map_err(|e| explain(&e)),
            }
        }
    }

    /// Runs a plain command on the node of `key`.
    pub(crate) async fn run(&self, _key: &[u8], command: Cmd) -> Result<Value> {
        let mut connection = self.connected().await?;
        let answer = connection.send_packed_command(&command).await;
        answer
            .and_then(Value::extract_error)
            .map_err(|e| explain(&e))
    }

    /// Listens on a channel, on a connection of its own. Whoever holds the listener gets what is
    /// published from now on; when it returns none, the connection is gone and must be made anew.
    pub(crate) async fn listen(&self, channel: &str) -> Result<Listener> {
        let (sender, pushed) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new().set_push_sender(sender);
        let connected = self
            .listener
            .get_multiplexed_async_connection_with_config(&config);
        let mut connection = connected.await.map_err(|e| explain(&e))?;
        let subscribed = connection.subscribe(channel).await;
        subscribed.map_err(|e| explain(&e))?;
        Ok(Listener {
            _connection: connection,
            pushed,
        })
    }
}

/// Hears what is published on a channel.
pub(crate) struct Listener {
    _connection: MultiplexedConnection,
    pushed: mpsc::UnboundedReceiver<PushInfo>,
}

impl Listener {
    pub(crate) async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let push = self.pushed.recv().await?;
            match push.kind {
                PushKind::Message => match push.data.into_iter().nth(1) {
                    Some(Value::BulkString(body)) => return Some(body),
                    _ => return None,
                },
                PushKind::Disconnection => return None,
                _ => {}
            }
        }
    }
}

fn explain(error: &RedisError) -> Error {
    let kind = match error.code() {
        Some("OOM") => ErrorKind::Full,
        _ if error.is_io_error() => ErrorKind::Unavailable,
        _ => ErrorKind::Unexpected,
    };
    Error::new(kind, "the server did not do it").caused_by(error.clone())
}
