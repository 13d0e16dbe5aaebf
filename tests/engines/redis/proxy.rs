//! The proxy does what it is told.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult};

use crate::redis::support::proxy::{Mode, Proxy};
use crate::redis::support::redis::Standalone;

const TIMEOUT: Duration = Duration::from_millis(500);

struct World {
    one: Standalone,
    proxy: Proxy,
}

impl World {
    async fn new() -> Self {
        let one = Standalone::start(&[]);
        let proxy = Proxy::start(one.server.port()).await;
        Self { one, proxy }
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let url = format!("redis://127.0.0.1:{}", self.proxy.port());
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(TIMEOUT))
            .set_response_timeout(Some(TIMEOUT));
        let client = redis::Client::open(url)?;
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }

    fn stored(&self) -> i64 {
        self.one
            .server
            .tell::<Option<i64>>(&["GET", "n"])
            .unwrap_or(0)
    }

    /// Waits until the server has counted so far.
    fn counted(&self, to: i64) {
        crate::redis::support::redis::until("the server counts", || {
            (self.stored() == to).then_some(())
        });
    }
}

async fn count(connection: &mut MultiplexedConnection) -> RedisResult<i64> {
    redis::cmd("INCR").arg("n").query_async(connection).await
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_passes_is_unchanged_whatever_its_size() {
    let world = World::new().await;
    let mut connection = world.connect().await.unwrap();
    world.proxy.set(Mode::Delay(Duration::from_millis(1)));
    let large = "\r\n$5\r\n*".repeat(40_000);
    redis::cmd("SET")
        .arg("large")
        .arg(&large)
        .exec_async(&mut connection)
        .await
        .unwrap();
    let got: String = redis::cmd("GET")
        .arg("large")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(got == large);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_reply_of_the_chosen_request_is_lost_and_the_request_is_not() {
    let world = World::new().await;
    let mut done = 0;
    for pass in [0, 1, 5] {
        let mut connection = world.connect().await.unwrap();
        world.proxy.lose_replies(pass, 1);
        for _ in 0..pass {
            done += 1;
            assert_eq!(count(&mut connection).await.unwrap(), done);
        }
        let error = count(&mut connection).await.unwrap_err();
        assert!(error.is_connection_dropped(), "{error:?}");
        done += 1;
        world.counted(done);
    }
    assert_eq!(world.proxy.lost(), 3);
    // A pipeline: what stands behind the doomed request never reaches the server.
    let mut connection = world.connect().await.unwrap();
    world.proxy.lose_replies(2, 1);
    let mut pipe = redis::pipe();
    for _ in 0..6 {
        pipe.incr("n", 1);
    }
    assert!(pipe.exec_async(&mut connection).await.is_err());
    world.counted(done + 3);
    assert_eq!((world.proxy.lost(), world.stored()), (4, done + 3));
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_cut_cable_is_silence_in_one_direction_or_both() {
    for (mode, arrives) in [
        (Mode::Drop, false),
        (Mode::DropRequests, false),
        (Mode::DropReplies, true),
        (Mode::HalfOpen, false),
    ] {
        let world = World::new().await;
        let mut connection = world.connect().await.unwrap();
        assert_eq!(count(&mut connection).await.unwrap(), 1);
        world.proxy.set(mode);
        let error = count(&mut connection).await.unwrap_err();
        assert!(error.is_timeout(), "{mode:?}: {error:?}");
        assert_eq!(world.stored(), 1 + i64::from(arrives), "{mode:?}");
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn connections_are_reset_and_refused() {
    let world = World::new().await;
    let mut connection = world.connect().await.unwrap();
    assert_eq!(count(&mut connection).await.unwrap(), 1);
    world.proxy.set(Mode::Refuse);
    assert!(world.connect().await.is_err());
    assert_eq!(
        count(&mut connection).await.unwrap(),
        2,
        "open ones live on"
    );
    world.proxy.set(Mode::Reset);
    let error = count(&mut connection).await.unwrap_err();
    assert!(error.is_connection_dropped(), "{error:?}");
    assert!(world.connect().await.is_err());
    world.proxy.set(Mode::Pass);
    let mut connection = world.connect().await.unwrap();
    assert_eq!(count(&mut connection).await.unwrap(), 3);
    assert_eq!(world.proxy.connections(), 4);
}
