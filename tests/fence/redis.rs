//! The fence on a real Redis server, and on a cluster.

use leasehold::fence::redis::{Commands, OpenKeys, RedisFence};
use leasehold::fence::{Fence as _, FenceError, Scope};
use leasehold::{FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject, check};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{FromRedisValue as _, Value};

use crate::conforms;
use crate::redis_server::{Cluster, STEADY, Standalone};

async fn connect(server: &Standalone) -> MultiplexedConnection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

struct Keys<C>(RedisFence<C>, C);

struct RedisHolder<C> {
    fence: RedisFence<C>,
    scope: Scope,
    token: FencingToken,
    opened: Option<OpenKeys<C>>,
}

fn key<C: ConnectionLike + Clone + Send + Sync>(fence: &RedisFence<C>, scope: &Scope) -> String {
    fence.key(format_args!("list:{scope}"))
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> Subject for Keys<C> {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        Box::new(RedisHolder {
            fence: self.0.clone(),
            scope: scope.clone(),
            token,
            opened: None,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        let mut all = redis::cmd("LRANGE");
        all.arg(key(&self.0, scope)).arg(0).arg(-1);
        all.query_async(&mut self.1.clone()).await.unwrap()
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.0.prune(below).await
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> Holder for RedisHolder<C> {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.opened = Some(self.fence.open(&self.scope, self.token).await?);
        Ok(())
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        let all = Commands::new().lrange(key(&self.fence, &self.scope), 0, -1);
        let answers = self.opened.as_mut().unwrap().run_all(all).await?;
        Ok(Vec::from_redis_value(answers[0].clone()).unwrap())
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        let push = Commands::new().rpush(key(&self.fence, &self.scope), value.to_string());
        self.opened
            .as_mut()
            .unwrap()
            .run_all(push)
            .await
            .map(|_| ())
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let push = Commands::new().rpush(key(&self.fence, &self.scope), value.to_string());
        let done = self
            .opened
            .as_mut()
            .unwrap()
            .write_once(operation, push)
            .await?;
        Ok(done.is_some())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn keys_of_a_server_conform() {
    let server = Standalone::start(&[]);
    let connection = connect(&server).await;
    let fence = RedisFence::new(connection.clone(), "bank").unwrap();
    conforms("redis", &Keys(fence, connection)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn keys_of_a_cluster_conform() {
    let cluster = Cluster::start(STEADY);
    let client = redis::cluster::ClusterClient::new(vec![first_node(&cluster.url())]).unwrap();
    let connection = client.get_async_connection().await.unwrap();
    // Tags that are spread over the nodes.
    for tag in ["bank", "b", "registry", "x7"] {
        let fence = RedisFence::new(connection.clone(), tag).unwrap();
        let figures = check(&Keys(fence, connection.clone()), 7, 500)
            .await
            .unwrap();
        println!("redis cluster, {tag}: {figures:?}");
    }
}

fn first_node(url: &str) -> String {
    let rest = url.split("://").nth(1).unwrap();
    let node = rest.split([',', '/', '?']).next().unwrap();
    format!("redis://{node}")
}

fn scope() -> Scope {
    Scope::parse("bank/default/k:account").unwrap()
}

fn invalid(error: &FenceError) -> Option<&'static str> {
    match error {
        FenceError::Trouble(error) => error.field(),
        FenceError::Stale(_) => None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_command_that_would_fail_is_found_before_the_first_write() {
    let server = Standalone::start(&[]);
    let mut connection = connect(&server).await;
    let fence = RedisFence::new(connection.clone(), "bank").unwrap();
    let [n, text, list, hash, big, other] =
        ["n", "text", "list", "hash", "big", "other"].map(|name| fence.key(name));
    let mut bank = fence.open(&scope(), FencingToken::new(9)).await.unwrap();
    let all = Commands::new()
        .set(&n, "5")
        .set(&text, "hello")
        .rpush(&list, "a")
        .hset(&hash, "n", "7")
        .hset(&hash, "text", "hello")
        .set(&big, i64::MAX.to_string());
    bank.run_all(all).await.unwrap();
    let touch = || Commands::new().set(&other, "touched");
    for (wrong, commands) in [
        ("a list is no string", touch().get(&list)),
        ("a string is no list", touch().rpush(&n, "1")),
        ("a text is no number", touch().incr_by(&text, 1)),
        (
            "a text in a hash is no number",
            touch().hincr_by(&hash, "text", 1),
        ),
        ("a counter that would run over", touch().incr_by(&big, 1)),
        ("a step that is too large", touch().incr_by(&n, i64::MAX)),
        (
            "of another type by then",
            touch().set(&list, "x").rpush(&list, "b"),
        ),
        (
            "counts on what is written",
            touch().set(&n, "x").incr_by(&n, 1),
        ),
        ("deleted by then", touch().del(&n).incr_by(&n, 1)),
        ("another slot", touch().get("{other}:key")),
        ("no tag", touch().get("key")),
        ("the fence's own", touch().del(fence.key("fence:marks"))),
    ] {
        let refused = bank.run_all(commands.clone()).await.unwrap_err();
        assert!(invalid(&refused).is_some(), "{wrong}: {refused}");
        let refused = bank.write_once(wrong, commands).await.unwrap_err();
        assert!(invalid(&refused).is_some(), "{wrong}: {refused}");
    }
    let mut get = redis::cmd("GET");
    let untouched: Option<String> = get.arg(&other).query_async(&mut connection).await.unwrap();
    assert_eq!(untouched, None);
    // What is right is done, all of it.
    let right = Commands::new()
        .incr_by(&n, -6)
        .hincr_by(&hash, "n", 1)
        .hincr_by(&hash, "new", 2)
        .lrange(&list, 0, -1)
        .get(fence.key("missing"))
        .expire(&text, std::time::Duration::from_secs(60))
        .del(&big);
    let answers = bank.run_all(right).await.unwrap();
    assert_eq!(answers[..3], [Value::Int(-1), Value::Int(8), Value::Int(2)]);
    assert_eq!((&answers[4], &answers[6]), (&Value::Nil, &Value::Int(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn opening_is_sent_with_the_first_commands_and_trouble_is_no_refusal() {
    let mut server = Standalone::start(crate::redis_server::AOF);
    let connection = connect(&server).await;
    let fence = RedisFence::new(connection, "bank").unwrap();
    let get = || Commands::new().get(fence.key("balance"));
    let (new, old) = (FencingToken::new(9), FencingToken::new(8));
    let (mut opened, read) = fence.open_with(&scope(), new, get()).await.unwrap();
    assert_eq!(read, [Value::Nil]);
    let stale = fence.open_with(&scope(), old, get()).await.unwrap_err();
    assert_eq!(stale.stale().unwrap().mark(), new);
    let large = fence.open(&scope(), FencingToken::new(1 << 53)).await;
    assert_eq!(invalid(&large.unwrap_err()), Some("token"));
    for tag in ["", "a{b", "a}b"] {
        assert!(RedisFence::new(connect(&server).await, tag).is_err());
    }
    server.server.kill();
    let down = opened.run_all(get()).await.unwrap_err();
    assert!(down.stale().is_none() && invalid(&down).is_none(), "{down}");
    // The marks are in the log with the data.
    server.server.restart();
    let fence = RedisFence::new(connect(&server).await, "bank").unwrap();
    let stale = fence.open(&scope(), old).await.unwrap_err();
    assert_eq!(stale.stale().unwrap().mark(), new);
}

/// More scopes than one step of a prune takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_prune_of_many_scopes_leaves_none() {
    let server = Standalone::start(&[]);
    let mut connection = connect(&server).await;
    let fence = RedisFence::new(connection.clone(), "bank").unwrap();
    for n in 0..501 {
        let scope = Scope::parse(&format!("bank/default/k:{n}")).unwrap();
        fence.open(&scope, FencingToken::new(9)).await.unwrap();
    }
    let mut left = redis::cmd("ZCARD");
    left.arg(fence.key("fence:marks"));
    let before: u64 = left.query_async(&mut connection).await.unwrap();
    fence.prune(FencingToken::new(10)).await.unwrap();
    let after: u64 = left.query_async(&mut connection).await.unwrap();
    assert_eq!((before, after), (501, 0));
}
