//! The fixtures do what they say.

use crate::redis::support::redis::{AOF, Cluster, RDB_ONLY, SentinelSet, Standalone};

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_killed_server_comes_back_on_its_port_with_what_is_on_disk() {
    for (lines, kept) in [(AOF, Some(1)), (RDB_ONLY, None)] {
        let mut one = Standalone::start(lines);
        let port = one.server.port();
        one.server.tell::<()>(&["SET", "n", "1"]);
        one.server.kill();
        assert!(one.server.ask::<()>(&["PING"]).is_err());
        one.server.restart();
        assert_eq!(one.server.port(), port);
        assert_eq!(one.server.tell::<Option<u32>>(&["GET", "n"]), kept);
    }
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_cut_off_primary_is_replaced_and_what_it_took_meanwhile_is_lost() {
    let set = SentinelSet::start(&[]);
    let old = &set.servers[0];
    assert_eq!(set.primary(), Some(old.port()));
    old.tell::<()>(&["SET", "before", "1"]);
    old.replicated(2);
    old.cut_off();
    old.tell::<()>(&["SET", "after", "1"]);
    let new = set.failed_over(old.port());
    let new = &set.servers[new];
    assert_eq!(new.tell::<Option<u32>>(&["GET", "before"]), Some(1));
    assert_eq!(new.tell::<Option<u32>>(&["GET", "after"]), None);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_killed_node_is_replaced_by_its_replica() {
    let mut cluster = Cluster::start(&[]);
    let old = cluster.owner_of("k");
    cluster.nodes[old].kill();
    let new = cluster.failed_over("k", old);
    assert_ne!(new, old);
    cluster.nodes[new].tell::<()>(&["SET", "k", "1"]);
    assert_eq!(cluster.nodes[new].tell::<u32>(&["GET", "k"]), 1);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_paused_server_answers_when_it_is_resumed() {
    let one = Standalone::start(&[]);
    one.server.pause();
    assert!(one.server.ask::<()>(&["PING"]).is_err());
    one.server.resume();
    one.server.tell::<()>(&["PING"]);
}
