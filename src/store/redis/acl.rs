//! The least that a user of this store needs to be allowed.

use super::RedisStore;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::job::Namespace;

/// What the functions and the store send, and nothing else. `role` is for Sentinel,
/// `cluster|slots`, `asking` and `readonly` are for a cluster, `select` is for a database other
/// than 0.
pub(crate) const COMMANDS: &[&str] = &[
    "asking",
    "cluster|slots",
    "del",
    "exists",
    "fcall",
    "function|load",
    "hdel",
    "hexists",
    "hget",
    "hgetall",
    "hincrby",
    "hlen",
    "hmget",
    "hscan",
    "hset",
    "hsetnx",
    "lindex",
    "llen",
    "lpop",
    "lpush",
    "lrange",
    "lset",
    "pexpire",
    "ping",
    "publish",
    "readonly",
    "role",
    "rpush",
    "select",
    "subscribe",
    "time",
    "zadd",
    "zcard",
    "zcount",
    "zlexcount",
    "zpopmin",
    "zrange",
    "zrem",
    "zscan",
    "zscore",
];

/// Of these, what is not needed on every server, or is refused before anything is written.
const NOT_EVERYWHERE: [&str; 9] = [
    "asking",
    "cluster|slots",
    "fcall",
    "function|load",
    "ping",
    "readonly",
    "role",
    "select",
    "subscribe",
];

/// A command as the store would send it, behind its name. With arguments too few to find the keys
/// in, asking for the rights ends a server of version 7.0.
fn sample(name: &str, key: &str, namespace: &Namespace) -> String {
    let channel = format!("{namespace}:wake:0");
    let words = name.replace('|', " ");
    match name {
        "asking" | "cluster|slots" | "ping" | "readonly" | "role" | "time" => {
            format!("{name} {words}")
        }
        "select" => format!("{name} {words} 1"),
        "publish" | "subscribe" => format!("{name} {words} {channel}"),
        "fcall" => format!("{name} {words} f 1 {key}"),
        "function|load" => format!("{name} {words} text"),
        "del" | "exists" | "hlen" | "zpopmin" => format!("{name} {words} {key}"),
        _ => format!("{name} {words} {key} 1 1"),
    }
}

/// All commands as the function `rights` reads them, on this key.
pub(super) fn samples(key: &str, namespace: &Namespace) -> String {
    let lines = COMMANDS.iter().map(|name| sample(name, key, namespace));
    lines.collect::<Vec<_>>().join("\n")
}

impl RedisStore {
    /// Refuses a user who may not do what the functions do, and tells the time of the store.
    pub(super) async fn check_rights(&self) -> Result<Timestamp> {
        let (home, namespace) = (&self.shared.home, &self.shared.options.namespace);
        // Users may be kept to some of the queues; all of them need the namespace's own keys.
        let samples = samples(&format!("{}none", home.tag()), namespace);
        let function = &self.functions().rights;
        let mut reply = self.look(function, home, &[samples.as_bytes()]).await?;
        let missing = String::from_utf8_lossy(&reply.body.rest()).into_owned();
        let needed = |name: &&str| !NOT_EVERYWHERE.contains(name);
        let missing: Vec<&str> = missing.lines().filter(needed).collect();
        if missing.is_empty() {
            return Ok(reply.now);
        }
        let why = format!(
            "the user may not run {} on the keys and channels of namespace {namespace}; the guide has \
             the rule for ACL SETUSER",
            missing.join(", ")
        );
        Err(Error::new(ErrorKind::Denied, why))
    }
}

/// The rule for `ACL SETUSER name on >password …`: the commands above, on the keys and channels of
/// one namespace.
///
/// ```text
/// ACL SETUSER app on >password resetkeys resetchannels -@all +asking +cluster|slots +del …
///     ~{leasehold:* ~{leasehold}:* &leasehold:wake:*
/// ```
pub fn acl_rule(namespace: &Namespace) -> String {
    let commands: Vec<String> = COMMANDS.iter().map(|name| format!("+{name}")).collect();
    let commands = commands.join(" ");
    format!(
        "resetkeys resetchannels -@all {commands} \
         ~{{{namespace}:* ~{{{namespace}}}:* &{namespace}:wake:*"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_command_of_the_functions() {
        let place = concat!(env!("CARGO_MANIFEST_DIR"), "/src/store/redis");
        let mut found = 0;
        for entry in std::fs::read_dir(place).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "lua") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for part in text.split("call('").skip(1) {
                let name = part.split('\'').next().unwrap().to_lowercase();
                assert!(COMMANDS.contains(&&*name), "{name} of {}", path.display());
                found += 1;
            }
        }
        assert!(found > 20, "{found} commands");
    }

    #[test]
    fn the_guide_has_the_rule_as_it_is() {
        let guide = include_str!("../../guide/redis.md");
        let (_, rest) = guide.split_once("ACL SETUSER app on >password ").unwrap();
        let (shown, _) = rest.split_once("```").unwrap();
        let shown: Vec<&str> = shown.split_whitespace().collect();
        assert_eq!(shown.join(" "), acl_rule(&Namespace::default()));
    }

    #[test]
    fn the_rule_names_one_namespace_only() {
        let rule = acl_rule(&Namespace::new("shop").unwrap());
        assert!(rule.starts_with("resetkeys resetchannels -@all +asking "));
        assert!(rule.ends_with(" ~{shop:* ~{shop}:* &shop:wake:*"));
    }
}
