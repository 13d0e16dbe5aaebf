//! Several servers that keep one another's data: a Sentinel set, a cluster of six.

use std::path::Path;

use ::redis::{FromRedisValue, Value};
use tempfile::TempDir;

use super::{ADMIN, BY_NAME, Server, owned, until};

/// The name under which the sentinels know the primary.
const SERVICE: &str = "jobs";

/// Peers log in under names of their own, so that they can be shut out while clients are let in.
const PEERS: &[&str] = &[
    "user replica on >replica ~* &* +@all",
    "user sentinel on >sentinel ~* &* +@all",
    "masteruser replica",
    "masterauth replica",
];

/// A primary, two replicas, and three sentinels that watch them.
pub struct SentinelSet {
    pub servers: Vec<Server>,
    pub sentinels: Vec<Server>,
    _root: TempDir,
}

impl SentinelSet {
    /// All up: replicas in sync, sentinels know the replicas and each other.
    pub fn start(lines: &[&str]) -> Self {
        let root = TempDir::new().unwrap();
        let primary = Server::start(root.path(), ADMIN, &owned(&[BY_NAME, PEERS, lines]));
        let follow = format!("replicaof 127.0.0.1 {}", primary.port());
        let mut servers = vec![primary];
        for _ in 0..2 {
            let lines = owned(&[BY_NAME, PEERS, lines, &[&follow]]);
            servers.push(Server::start(root.path(), ADMIN, &lines));
        }
        let watch = [
            format!(
                "sentinel monitor {SERVICE} 127.0.0.1 {} 2",
                servers[0].port()
            ),
            format!("sentinel auth-user {SERVICE} sentinel"),
            format!("sentinel auth-pass {SERVICE} sentinel"),
            format!("sentinel down-after-milliseconds {SERVICE} 2000"),
            format!("sentinel failover-timeout {SERVICE} 10000"),
            format!("sentinel parallel-syncs {SERVICE} 2"),
        ];
        let sentinels = (0..3).map(|_| sentinel(root.path(), &watch)).collect();
        let set = Self {
            servers,
            sentinels,
            _root: root,
        };
        set.settled();
        set
    }

    /// Waits until every replica is in sync and every sentinel knows all of its peers.
    pub fn settled(&self) {
        for replica in &self.servers[1..] {
            until("the replica is in sync", || {
                let status = replica.info(&["INFO", "replication"], "master_link_status")?;
                (status == "up").then_some(())
            });
        }
        for sentinel in &self.sentinels {
            until("the sentinel knows its peers", || {
                let known = |field| sentinel_count(sentinel, field);
                (known("num-slaves")? == 2 && known("num-other-sentinels")? == 2).then_some(())
            });
        }
    }

    /// `redis+sentinel://USER:PASSWORD@h1,h2,h3/SERVICE`
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.sentinels.iter().map(Server::address).collect();
        format!("redis+sentinel://{ADMIN}{}/{SERVICE}", hosts.join(","))
    }

    /// The port that a majority of the sentinels gives for the primary.
    pub fn primary(&self) -> Option<u16> {
        let ask = |sentinel: &Server| {
            let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE];
            let (_, port): (String, u16) = sentinel.ask(&words).ok()?;
            Some(port)
        };
        let answers: Vec<Option<u16>> = self.sentinels.iter().map(ask).collect();
        let agreed = |port: &&u16| answers.iter().filter(|a| **a == Some(**port)).count() >= 2;
        answers.iter().flatten().find(agreed).copied()
    }

    /// Waits until a server other than that on `old` is primary, and gives its index.
    pub fn failed_over(&self, old: u16) -> usize {
        until("another server is primary", || {
            let new = self.primary().filter(|port| *port != old)?;
            let at = self
                .servers
                .iter()
                .position(|server| server.port() == new)?;
            let role = self.servers[at].info(&["INFO", "replication"], "role")?;
            (role == "master").then_some(at)
        })
    }
}

fn sentinel(root: &Path, lines: &[String]) -> Server {
    for _ in 0..10 {
        let mut server = Server::make(root, "", lines, true);
        if server.launch() {
            return server;
        }
    }
    panic!("ten ports in a row were taken by others");
}

fn sentinel_count(sentinel: &Server, field: &str) -> Option<u64> {
    let words = ["SENTINEL", "MASTER", SERVICE];
    let answer: Vec<String> = sentinel.ask(&words).ok()?;
    let at = answer.iter().position(|word| word == field)?;
    answer.get(at + 1)?.parse().ok()
}

/// Three primaries, each with a replica: node `i + 3` follows node `i`.
pub struct Cluster {
    pub nodes: Vec<Server>,
    _root: TempDir,
}

impl Cluster {
    /// All up: every node says that the cluster is, and the replicas are in sync.
    pub fn start(lines: &[&str]) -> Self {
        const CLUSTER: &[&str] = &[
            "cluster-enabled yes",
            "cluster-node-timeout 2000",
            "cluster-replica-validity-factor 0",
            "cluster-allow-replica-migration no",
        ];
        let root = TempDir::new().unwrap();
        let lines = owned(&[PEERS, CLUSTER, lines]);
        let node = |_| Server::start(root.path(), "", &lines);
        let nodes: Vec<Server> = (0..6).map(node).collect();
        let cluster = Self { nodes, _root: root };
        cluster.join();
        cluster
    }

    fn join(&self) {
        let slots = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
        for (at, node) in self.nodes.iter().enumerate() {
            node.tell::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
            if let Some((first, last)) = slots.get(at) {
                node.tell::<()>(&["CLUSTER", "ADDSLOTSRANGE", first, last]);
            }
        }
        for node in &self.nodes[1..] {
            let port = node.port().to_string();
            let bus = node.bus.as_ref().map_or(0, |bus| bus.number).to_string();
            self.nodes[0].tell::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        for node in &self.nodes {
            says(node, "cluster_known_nodes", "6");
        }
        for (replica, primary) in self.nodes[3..].iter().zip(&self.nodes) {
            let id: String = primary.tell(&["CLUSTER", "MYID"]);
            // Refused until gossip has told the replica that its primary is one.
            until("the replica follows", || {
                replica.ask::<()>(&["CLUSTER", "REPLICATE", &id]).ok()
            });
        }
        self.settled();
    }

    /// Waits until every running node says that all slots are served, and by whom is agreed; and
    /// until every running replica is in sync.
    pub fn settled(&self) {
        let running: Vec<&Server> = self.nodes.iter().filter(|n| n.is_running()).collect();
        for node in &running {
            says(node, "cluster_state", "ok");
            says(node, "cluster_slots_ok", "16384");
            until("the replica is in sync", || {
                let replication = |field| node.info(&["INFO", "replication"], field);
                let role = replication("role")?;
                (role == "master" || replication("master_link_status")? == "up").then_some(())
            });
        }
        until("the nodes agree on the primaries", || {
            let owners: Option<Vec<_>> = running.iter().map(|node| owners(node)).collect();
            owners?
                .windows(2)
                .all(|pair| pair[0] == pair[1])
                .then_some(())
        });
    }

    /// `redis+cluster://h1,h2,…`
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(Server::address).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// Moves the slot of this key to another node, key by key, as `redis-cli --cluster reshard`
    /// does.
    pub fn move_slot(&self, key: &str, from: usize, to: usize) {
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let slot = source.tell::<u16>(&["CLUSTER", "KEYSLOT", key]).to_string();
        let id = |node: &Server| node.tell::<String>(&["CLUSTER", "MYID"]);
        let set = |node: &Server, how: &str, other: &str| {
            node.tell::<()>(&["CLUSTER", "SETSLOT", &slot, how, other]);
        };
        set(target, "IMPORTING", &id(source));
        set(source, "MIGRATING", &id(target));
        let port = target.port().to_string();
        loop {
            let keys: Vec<String> = source.tell(&["CLUSTER", "GETKEYSINSLOT", &slot, "1"]);
            let Some(key) = keys.first() else { break };
            source.tell::<()>(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
        }
        for node in [target, source] {
            set(node, "NODE", &id(target));
        }
        until("all nodes know where the slot is", || {
            let running = self.nodes.iter().filter(|node| node.is_running());
            let number: u16 = slot.parse().ok()?;
            let mut owners = running.map(|node| {
                let owners = owners(node)?;
                let mut there = owners
                    .iter()
                    .filter(|(first, last, _)| (*first..=*last).contains(&number));
                there.next().map(|(_, _, port)| *port)
            });
            owners.all(|port| port == Some(target.port())).then_some(())
        });
    }

    /// Waits until every running node has heard that the slots are served on these ports.
    pub fn announced(&self, ports: &[u16]) {
        for node in self.nodes.iter().filter(|node| node.is_running()) {
            until("the nodes know where the others are reached", || {
                let owners = owners(node)?;
                owners
                    .iter()
                    .all(|(_, _, port)| ports.contains(port))
                    .then_some(())
            });
        }
    }

    /// The node that serves the slot of this key, as the first that runs sees it.
    pub fn owner_of(&self, key: &str) -> usize {
        let asked = self
            .nodes
            .iter()
            .find(|node| node.is_running())
            .expect("one runs");
        let slot: u16 = asked.tell(&["CLUSTER", "KEYSLOT", key]);
        let owners = owners(asked).expect("it knows the slots");
        let port = owners
            .iter()
            .find(|(first, last, _)| (*first..=*last).contains(&slot));
        let port = port.expect("all slots are served").2;
        self.nodes
            .iter()
            .position(|node| node.port() == port)
            .expect("one of ours")
    }

    /// Waits until another node than `old` serves the slot of this key, and gives its index.
    pub fn failed_over(&self, key: &str, old: usize) -> usize {
        let replica = (old + 3) % 6;
        until("the replica has taken over", || {
            let role = self.nodes[replica].info(&["INFO", "replication"], "role")?;
            (role == "master").then_some(())
        });
        self.settled();
        let new = self.owner_of(key);
        assert_ne!(new, old, "the slots have another owner");
        new
    }
}

/// Which port serves which slots: first, last, port; in order.
fn owners(node: &Server) -> Option<Vec<(u16, u16, u16)>> {
    let answer: Vec<Vec<Value>> = node.ask(&["CLUSTER", "SLOTS"]).ok()?;
    let row = |row: &Vec<Value>| {
        let number = |value: &Value| u16::from_redis_value(value.clone()).ok();
        let Value::Array(primary) = row.get(2)? else {
            return None;
        };
        Some((
            number(row.first()?)?,
            number(row.get(1)?)?,
            number(primary.get(1)?)?,
        ))
    };
    let mut rows = answer.iter().map(row).collect::<Option<Vec<_>>>()?;
    rows.sort_unstable();
    Some(rows)
}

fn says(node: &Server, field: &str, value: &str) {
    until(&format!("{field}:{value} on {}", node.address()), || {
        let found = node.info(&["CLUSTER", "INFO"], field)?;
        (found == value).then_some(())
    });
}
