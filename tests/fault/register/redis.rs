//! A key of a Redis server.

use leasehold::fence::redis::{Commands, RedisFence};
use leasehold::{Context, Failure, FencingToken, async_trait};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, FromRedisValue, Script};

use super::{Names, Register};

/// Sets the mark and the value, unless the mark is larger.
const WRITE_CHECKED: &str = "
    if tonumber(redis.call('GET', KEYS[2]) or '0') > tonumber(ARGV[1]) then return 0 end
    redis.call('SET', KEYS[2], ARGV[1])
    redis.call('SET', KEYS[1], ARGV[2])
    return 1";

pub(crate) struct Value {
    db: MultiplexedConnection,
    fence: RedisFence<MultiplexedConnection>,
    key: String,
}

impl Value {
    pub(crate) async fn connect(server: &str, tag: &str, key: usize) -> Self {
        let client = redis::Client::open(server).unwrap();
        let db = client.get_multiplexed_async_connection().await.unwrap();
        let fence = RedisFence::new(db.clone(), tag).unwrap();
        let key = fence.key(key);
        Self { db, fence, key }
    }
}

#[async_trait]
impl Register for Value {
    async fn read(&mut self) -> Names {
        parse(self.db.get(&self.key).await.unwrap())
    }

    async fn write(&mut self, names: &Names) {
        let () = self.db.set(&self.key, text(names)).await.unwrap();
    }

    async fn write_checked(&mut self, token: FencingToken, names: &Names) -> bool {
        let script = Script::new(WRITE_CHECKED);
        let mut call = script.key(&self.key);
        call.key(format!("{}:mark", self.key));
        call.arg(token.get()).arg(text(names));
        call.invoke_async(&mut self.db).await.unwrap()
    }

    async fn open_and_read(&mut self, ctx: &Context) -> Result<Names, Failure> {
        let mut opened = ctx.fence(&self.fence).await?;
        let mut answers = opened.run_all(Commands::new().get(&self.key)).await?;
        Ok(parse(FromRedisValue::from_redis_value(answers.remove(0))?))
    }

    async fn write_fenced(&mut self, ctx: &Context, names: &Names) -> Result<bool, Failure> {
        let set = Commands::new().set(&self.key, text(names));
        let written = match ctx.fence(&self.fence).await {
            Ok(mut opened) => opened.run_all(set).await.map(|_| true),
            Err(error) => Err(error),
        };
        match written {
            Err(error) if error.stale().is_some() => Ok(false),
            written => Ok(written?),
        }
    }
}

fn parse(text: Option<String>) -> Names {
    text.map_or_else(Names::new, |text| serde_json::from_str(&text).unwrap())
}

fn text(names: &Names) -> String {
    serde_json::to_string(names).unwrap()
}
