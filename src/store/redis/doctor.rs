//! The check-up of a server: what can be lost, and what to set.
//!
//! Reads what the server says of itself, and changes nothing but that it loads the function library
//! where it is missing, as a worker's first call would. What the user may not ask is reported as
//! unseen, never as fine.

use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, FromRedisValue, Value};

use super::acl::samples;
use super::dial::{Dialer, Wire};
use super::fault::explain;
use super::library::SERVERS;
use super::link::is_there;
use super::url::{Address, Host, Servers};
use super::{RedisOptions, RedisStore, Reply};
use crate::clock::{Clock as _, SystemClock, monotonic};
use crate::error::{Result, Verb};
use crate::inspect::QueueView;
use crate::job::{Namespace, QueueName};
use crate::store::health::{Finding, Level};
use crate::store::open::redis_options;

/// The oldest version that has functions.
const OLDEST: (u32, u32) = (7, 0);

/// A clock that differs more than this from the asker's is worth a look.
const CLOCKS: Duration = Duration::from_secs(1);

/// Keys that a server looks at in one step of a search, a tenth of a millisecond of its time.
const SCANNED: usize = 500;

/// A replica that has not been heard of for so many seconds is not a copy.
const LAG: u64 = 10;

/// Looks at every server that takes writes.
///
/// # Errors
/// `InvalidInput`, `Unavailable`, `Denied`: it could not get in.
pub async fn examine(url: &str) -> Result<Vec<Finding>> {
    let options = redis_options(url)?;
    let namespace = options.namespace.clone();
    let dialer = Dialer::new(Address::parse(options.url())?)?;
    let mut findings = match dialer.dial().await.map_err(super::at(Verb::Open))? {
        Wire::One(connection) => {
            let mut patient = Patient {
                connection,
                namespace,
            };
            let mut findings = patient.examine().await;
            findings.extend(patient.cluster(&dialer.address().servers).await);
            findings
        }
        Wire::Cluster(_) => examine_cluster(&dialer, &namespace).await?,
    };
    let store = RedisStore::open(options)?;
    findings.extend(store.books().await);
    findings.push(store.lost().await);
    Ok(findings)
}

impl RedisStore {
    /// What the tokens say of the clock, and the ledger of the leases.
    async fn books(&self) -> [Finding; 2] {
        let unseen = |check| Finding::unseen(check, "the rights of the store");
        let behind =
            |views: Vec<QueueView>| views.iter().filter_map(|view| view.clock_behind).max();
        [
            self.queue_views()
                .await
                .map_or_else(|_| unseen("tokens"), |views| Finding::tokens(behind(views))),
            self.ledger().await.unwrap_or_else(|_| unseen("ledger")),
        ]
    }

    /// Whether the ledger counts as many live leases as there are.
    async fn ledger(&self) -> Result<Finding> {
        let (mut counted, mut there) = (0_i64, 0_i64);
        for partition in self.all_partitions().await? {
            let Some(leases) = self.leases_in(&partition).await? else {
                let advice = "ask again when it is calmer, or pause the queue";
                let found = format!("queue {} is too busy to count", partition.queue.name);
                return Ok(Finding::note("ledger", found, advice));
            };
            counted += leases.counted;
            there += leases.there;
        }
        let mut finding = Finding::ledger(counted.max(0).unsigned_abs(), there.unsigned_abs());
        if finding.level == Level::Risk {
            finding.advice = "data of the store was lost or deleted by hand: find out by whom; \
                              `leasehold doctor --repair` puts back what can be, and counts anew"
                .into();
        }
        Ok(finding)
    }
}

/// Partitions of which the servers have keys, whatever the list of queues says.
pub(super) async fn partitions_there(options: &RedisOptions) -> Result<Vec<(QueueName, u16)>> {
    let namespace = &options.namespace;
    let dialer = Dialer::new(Address::parse(options.url())?)?;
    let mut servers = Vec::new();
    match dialer.dial().await? {
        Wire::One(connection) => servers.push(connection),
        Wire::Cluster(mut connection) => {
            for host in primaries(&mut connection).await {
                servers.push(dialer.one(&host).await?);
            }
        }
    }
    let mut found = Vec::new();
    for mut server in servers {
        let mut cursor = 0_u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor)
                .arg("MATCH")
                .arg(format!("{{{namespace}:*:*}}:*"));
            scan.arg("COUNT").arg(SCANNED);
            let answer = scan.query_async(&mut server).await;
            let (next, keys): (u64, Vec<Vec<u8>>) = answer.map_err(|error| explain(&error))?;
            found.extend(keys.iter().filter_map(|key| partition_of(namespace, key)));
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
    }
    Ok(found)
}

/// The partition that a key of the books or of the jobs belongs to.
fn partition_of(namespace: &Namespace, key: &[u8]) -> Option<(QueueName, u16)> {
    let key = str::from_utf8(key).ok()?.strip_prefix('{')?;
    let rest = key.strip_prefix(namespace.as_str())?.strip_prefix(':')?;
    let (tag, part) = rest.split_once("}:")?;
    let (queue, number) = tag.split_once(':')?;
    let is_there = matches!(part, "meta" | "jobs");
    let place = (QueueName::new(queue).ok()?, number.parse().ok()?);
    is_there.then_some(place)
}

/// Each primary of a cluster has its own settings, its own memory, its own clock.
async fn examine_cluster(dialer: &Dialer, namespace: &Namespace) -> Result<Vec<Finding>> {
    let Servers::Cluster(seeds) = &dialer.address().servers else {
        return Ok(Vec::new());
    };
    let mut trouble = None;
    for seed in seeds {
        let connection = match dialer.one(seed).await {
            Ok(connection) => connection,
            Err(error) => {
                trouble = Some(error);
                continue;
            }
        };
        let mut patient = Patient {
            connection,
            namespace: namespace.clone(),
        };
        let whole = patient.cluster(&dialer.address().servers).await;
        let mut findings: Vec<Finding> = whole.into_iter().collect();
        for host in primaries(&mut patient.connection).await {
            match dialer.one(&host).await {
                Ok(connection) => {
                    let namespace = namespace.clone();
                    let mut patient = Patient {
                        connection,
                        namespace,
                    };
                    let found = patient.examine().await;
                    findings.extend(found.into_iter().map(|mut finding| {
                        finding.place = host.to_string();
                        finding
                    }));
                }
                Err(error) => {
                    let advice = "its slots take no calls until it or a replica answers";
                    let mut finding = Finding::risk("connection", error.to_string(), advice);
                    finding.place = host.to_string();
                    findings.push(finding);
                }
            }
        }
        return Ok(findings);
    }
    match trouble {
        Some(error) => Err(error),
        None => Ok(Vec::new()),
    }
}

/// A server that is looked at.
struct Patient {
    connection: MultiplexedConnection,
    namespace: Namespace,
}

impl Patient {
    async fn ask<T: FromRedisValue>(&mut self, command: &Cmd) -> Option<T> {
        command.query_async(&mut self.connection).await.ok()
    }

    async fn info(&mut self, section: &str) -> Option<Info> {
        let mut command = redis::cmd("INFO");
        self.ask(command.arg(section)).await.map(Info)
    }

    /// One setting, if this user may see it.
    async fn setting(&mut self, name: &str) -> Option<String> {
        let mut command = redis::cmd("CONFIG");
        let pair: Vec<String> = self.ask(command.arg("GET").arg(name)).await?;
        pair.into_iter().nth(1)
    }

    async fn examine(&mut self) -> Vec<Finding> {
        vec![
            self.version().await,
            self.persistence().await,
            self.eviction().await,
            self.memory().await,
            self.replication().await,
            self.clock().await,
            self.rights().await,
        ]
    }

    async fn version(&mut self) -> Finding {
        const CHECK: &str = "version";
        let Some(info) = self.info("server").await else {
            return Finding::unseen(CHECK, "+info");
        };
        // Valkey says which Redis it stands in for, too.
        let version = info.text("redis_version");
        let mut parts = version.split('.').map_while(|part| part.parse().ok());
        let number = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        if number >= OLDEST {
            return Finding::fine(CHECK, version);
        }
        let advice = "the functions need version 7.0 or later: upgrade the server";
        Finding::risk(CHECK, version, advice)
    }

    async fn persistence(&mut self) -> Finding {
        const CHECK: &str = "persistence";
        let Some(info) = self.info("persistence").await else {
            return Finding::unseen(CHECK, "+info");
        };
        let failed = |field: &str| !matches!(info.text(field), "ok" | "");
        if failed("aof_last_write_status") || failed("aof_last_bgrewrite_status") {
            let advice =
                "the server cannot write its append-only file: free the disk, read its log";
            return Finding::risk(CHECK, "the last write to disk failed", advice);
        }
        if info.number("aof_enabled") == 1 {
            return match self.setting("appendfsync").await.as_deref() {
                Some("always") => Finding::fine(CHECK, "AOF, fsync at every write"),
                Some("everysec") => Finding::note(
                    CHECK,
                    "AOF, fsync every second",
                    "a killed server loses nothing; a machine that loses power, up to two seconds of \
                     answered calls. `appendfsync always` closes that gap, and costs speed",
                ),
                Some(other) => Finding::risk(
                    CHECK,
                    format!("AOF, fsync {other}"),
                    "a machine that loses power loses what the system had not written, often 30 \
                     seconds: set `appendfsync everysec` or `always`",
                ),
                None => Finding::note(
                    CHECK,
                    "AOF, fsync policy unseen",
                    "ask with a user that has +config|get",
                ),
            };
        }
        let advice = "set `appendonly yes`";
        if failed("rdb_last_bgsave_status") {
            return Finding::risk(CHECK, "snapshots only, and the last one failed", advice);
        }
        match self.setting("save").await.as_deref() {
            Some("") => Finding::risk(
                CHECK,
                "none",
                "a restart loses every job and every lease: set `appendonly yes`",
            ),
            _ => Finding::risk(
                CHECK,
                "snapshots only (RDB)",
                "a crash loses every answered call since the last snapshot: set `appendonly yes`",
            ),
        }
    }

    async fn eviction(&mut self) -> Finding {
        const CHECK: &str = "eviction";
        let Some(info) = self.info("memory").await else {
            return Finding::unseen(CHECK, "+info");
        };
        let policy = info.text("maxmemory_policy").to_owned();
        if policy == "noeviction" {
            return Finding::fine(CHECK, policy);
        }
        let advice = "when memory runs out the server deletes jobs and leases to make room: set \
                      `maxmemory-policy noeviction`";
        Finding::risk(CHECK, policy, advice)
    }

    async fn memory(&mut self) -> Finding {
        const CHECK: &str = "memory";
        const MIB: u64 = 1 << 20;
        let Some(info) = self.info("memory").await else {
            return Finding::unseen(CHECK, "+info");
        };
        let (used, limit) = (info.number("used_memory"), info.number("maxmemory"));
        if limit == 0 {
            let advice = "the system ends the server when memory runs out: set `maxmemory` to what \
                          the machine can spare, and enqueues fail instead";
            let found = format!("{} MiB used, no limit", used / MIB);
            return Finding::note(CHECK, found, advice);
        }
        let found = format!("{} of {} MiB used", used / MIB, limit / MIB);
        if used > limit - limit / 5 {
            let advice = "less than a fifth is left; when nothing is, enqueues and claims are \
                          refused: raise `maxmemory`, or let the queues drain";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    async fn replication(&mut self) -> Finding {
        const CHECK: &str = "replication";
        let Some(info) = self.info("replication").await else {
            return Finding::unseen(CHECK, "+info");
        };
        if info.text("role") != "master" {
            let advice = "a replica takes no writes: give the primary's address, or the sentinels'";
            return Finding::risk(CHECK, "this server is a replica", advice);
        }
        let replicas = info.number("connected_slaves");
        if replicas == 0 {
            let advice =
                "if this machine is lost, so is what is on it: add a replica, or keep backups";
            return Finding::note(CHECK, "no replicas", advice);
        }
        let lags = (0..replicas).filter_map(|at| {
            let line = info.text(&format!("slave{at}"));
            let lag = line.split(',').find_map(|part| part.strip_prefix("lag="))?;
            lag.parse::<u64>().ok()
        });
        let lag = lags.max().unwrap_or(0);
        let found = format!("{replicas} replicas, the last heard of {lag} s ago");
        if lag > LAG {
            let advice = "a failover to that replica loses what it has not got: look at its link";
            return Finding::risk(CHECK, found, advice);
        }
        match self.setting("min-replicas-to-write").await.as_deref() {
            Some("0") => Finding::risk(
                CHECK,
                format!("{found}; min-replicas-to-write 0"),
                "a primary that is cut off goes on taking calls, which are lost when a replica has \
                 taken over: set `min-replicas-to-write 1` and `min-replicas-max-lag 10`",
            ),
            Some(least) => Finding::note(
                CHECK,
                format!("{found}; min-replicas-to-write {least}"),
                "replication is asynchronous: a failover can still lose the last moments before it",
            ),
            None => Finding::note(
                CHECK,
                format!("{found}; min-replicas-to-write unseen"),
                "ask with a user that has +config|get",
            ),
        }
    }

    async fn clock(&mut self) -> Finding {
        const CHECK: &str = "clock";
        let sent = monotonic();
        let before = SystemClock.now();
        let Some((seconds, micros)) = self.ask::<(u64, u64)>(&redis::cmd("TIME")).await else {
            return Finding::unseen(CHECK, "+time");
        };
        let half = monotonic().duration_since(sent) / 2;
        let here = before.after(half).as_micros();
        let there = seconds * 1_000_000 + micros;
        let apart = Duration::from_micros(here.abs_diff(there));
        let which = if there > here { "ahead of" } else { "behind" };
        let found = format!("{apart:.1?} {which} this machine's, ± {half:.1?}");
        if apart > CLOCKS + half {
            let advice = "leases run on the server's clock, and a server that takes over must not \
                          be behind: run NTP on all of them, and find out which one is wrong";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    async fn rights(&mut self) -> Finding {
        const CHECK: &str = "rights";
        let namespace = self.namespace.clone();
        let function = &SERVERS.rights;
        if let Some(info) = self.info("replication").await
            && info.text("role") == "slave"
        {
            // It takes no library, and its primary's rights are another matter.
            return Finding::note(CHECK, "not looked at: a replica", "ask the primary");
        }
        let advice = "the guide has the rule for ACL SETUSER; the server must be Redis 7.0 or later, \
                      or Valkey, and take FUNCTION LOAD";
        let load = function.library().load();
        if let Err(error) = load.query_async::<()>(&mut self.connection).await
            && !is_there(&error)
        {
            let found = format!("cannot load the function library: {error}");
            return Finding::risk(CHECK, found, advice);
        }
        let key = format!("{{{namespace}:doctor:0}}:none");
        let samples = samples(&key, &namespace);
        let call = function.with(&[key.as_bytes()], &[samples.as_bytes()]);
        let answer = call.query_async::<Vec<u8>>(&mut self.connection).await;
        let answer = answer.map_err(|error| explain(&error));
        match answer.and_then(|answer| Ok(Reply::read(answer)?.body.rest())) {
            Ok(missing) if missing.is_empty() => Finding::fine(CHECK, "all that are needed"),
            Ok(missing) => {
                let missing = String::from_utf8_lossy(&missing);
                let found = format!("lacks {}", missing.replace('\n', ", "));
                let advice = format!(
                    "on the keys and channels of namespace {namespace}; the guide has the rule for \
                     ACL SETUSER"
                );
                Finding::risk(CHECK, found, advice)
            }
            Err(error) => Finding::risk(CHECK, format!("cannot call functions: {error}"), advice),
        }
    }

    /// Whether it is a cluster, whether the URL says so, and whether all slots are served.
    async fn cluster(&mut self, servers: &Servers) -> Option<Finding> {
        const CHECK: &str = "cluster";
        let expected = matches!(servers, Servers::Cluster(_));
        let mut command = redis::cmd("CLUSTER");
        let Some(text) = self.ask::<String>(command.arg("INFO")).await else {
            return expected.then(|| Finding::unseen(CHECK, "+cluster|info"));
        };
        let info = Info(text);
        if !expected {
            let advice = "the URL must begin with redis+cluster://, or most calls are refused";
            return Some(Finding::risk(
                CHECK,
                "the server belongs to a cluster",
                advice,
            ));
        }
        let found = format!(
            "{}, {} of 16384 slots served, {} primaries",
            info.text("cluster_state"),
            info.text("cluster_slots_ok"),
            info.text("cluster_size"),
        );
        if info.text("cluster_state") == "ok" && info.number("cluster_slots_ok") == 16_384 {
            return Some(Finding::fine(CHECK, found));
        }
        let advice = "queues whose slots nobody serves stand still: look for nodes that are down";
        Some(Finding::risk(CHECK, found, advice))
    }
}

/// The primaries of a cluster, as one of its nodes knows them.
async fn primaries(connection: &mut impl ConnectionLike) -> Vec<Host> {
    let mut command = redis::cmd("CLUSTER");
    let slots = command.arg("SLOTS").query_async(connection).await;
    let slots: Vec<Vec<Value>> = slots.unwrap_or_default();
    let mut hosts = Vec::new();
    for row in slots {
        let Some(Value::Array(primary)) = row.into_iter().nth(2) else {
            continue;
        };
        let mut parts = primary.into_iter();
        let name = parts
            .next()
            .and_then(|name| String::from_redis_value(name).ok());
        let port = parts
            .next()
            .and_then(|port| u16::from_redis_value(port).ok());
        if let (Some(name), Some(port)) = (name, port) {
            let host = Host { name, port };
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
    }
    hosts
}

/// Lines of `field:value`.
struct Info(String);

impl Info {
    fn text(&self, field: &str) -> &str {
        let line = |line: &'_ str| {
            line.strip_prefix(field)
                .is_some_and(|rest| rest.starts_with(':'))
        };
        let found = self.0.lines().find(|text| line(text));
        found.map_or("", |text| text[field.len() + 1..].trim())
    }

    fn number(&self, field: &str) -> u64 {
        self.text(field).parse().unwrap_or(0)
    }
}
