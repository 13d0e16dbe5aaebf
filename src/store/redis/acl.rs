//! The least that a user of this store needs to be allowed.

use crate::job::Namespace;

/// What the functions and the store send, and nothing else. `role` is for Sentinel,
/// `cluster|slots`,
/// `asking` and `readonly` for a cluster, `select` for a database other than 0.
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
    fn the_rule_names_one_namespace_only() {
        let rule = acl_rule(&Namespace::new("shop").unwrap());
        assert!(rule.starts_with("resetkeys resetchannels -@all +asking "));
        assert!(rule.ends_with(" ~{shop:* ~{shop}:* &shop:wake:*"));
    }
}
