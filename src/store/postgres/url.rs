//! A URL's settings of ours, and what is left for the server. Nothing of the URL is ever shown: it
//! may hold a password.

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use super::PostgresOptions;
use super::dial::Trust;
use crate::error::{Error, Result};
use crate::job::Namespace;
use crate::store::percent::decode;

/// What cannot be done here, though other clients of the server can: better refused than ignored.
const FOREIGN: [&str; 3] = ["sslcert", "sslkey", "sslcrl"];

/// Settings of ours, which no other client of the server takes.
const OURS: [&str; 5] = ["namespace", "schema", "connections", "clock", "migrate"];

impl PostgresOptions {
    /// The URL without leasehold's own settings: what other clients of the same database take, such
    /// as a pool of sqlx. So one setting of a program serves both.
    ///
    /// ```
    /// # use leasehold::store::PostgresOptions;
    /// let url = "postgres://app@db/app?namespace=billing&sslmode=require";
    /// assert_eq!(PostgresOptions::server_url(url), "postgres://app@db/app?sslmode=require");
    /// ```
    pub fn server_url(url: &str) -> String {
        let Some((address, query)) = url.split_once('?') else {
            return url.to_owned();
        };
        let is_theirs = |pair: &&str| !OURS.contains(&pair.split('=').next().unwrap_or_default());
        let theirs: Vec<&str> = query.split('&').filter(is_theirs).collect();
        match theirs.join("&") {
            rest if rest.is_empty() => address.to_owned(),
            rest => format!("{address}?{rest}"),
        }
    }
}

pub(super) fn parsed(url: &str) -> Result<(Config, PostgresOptions)> {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let mut options = PostgresOptions::new();
    let mut theirs = Vec::new();
    let (mut mode, mut root) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("namespace", name)) => options.namespace = Namespace::new(name)?,
            Some(("schema", name)) => options = options.schema(name)?,
            Some(("connections", n)) => {
                let n = n.parse().ok().filter(|n| (1..=1_000).contains(n));
                let bad = || wrong("connections", "a number from 1 to 1,000");
                options = options.connections(n.ok_or_else(bad)?);
            }
            Some(("migrate", "true")) => options = options.migrate(),
            Some(("migrate", "false")) => options = options.without_migrations(),
            Some(("migrate", _)) => return Err(wrong("migrate", "true or false")),
            Some(("clock", "strict")) => options = options.strict_clock(),
            Some(("clock", _)) => return Err(wrong("clock", "strict")),
            Some(("sslmode", name)) => mode = Some(name),
            Some(("sslrootcert", file)) => root = Some(file),
            Some((name, _)) if FOREIGN.contains(&name) => {
                return Err(wrong(name, "sslmode and sslrootcert alone"));
            }
            _ => {
                // The rest of the address aside, so that it can be said which one is wrong.
                if format!("postgres://host?{pair}").parse::<Config>().is_err() {
                    return Err(wrong(name_of(pair), "a setting of the server's or of ours"));
                }
                theirs.push(pair);
            }
        }
    }
    let mut rest = address.to_owned();
    for (at, pair) in theirs.into_iter().enumerate() {
        rest.push(if at == 0 { '?' } else { '&' });
        rest.push_str(pair);
    }
    let mut config = rest.parse::<Config>().map_err(|_| {
        let allowed = "postgres://USER:PASSWORD@HOST:PORT/DATABASE?SETTING=VALUE";
        Error::invalid("url", "one that cannot be read", allowed)
    })?;
    options.trust = match root {
        None | Some("system") => Trust::Anybody,
        Some(file) => {
            let bad = || wrong("sslrootcert", "a file; % and two hex digits, UTF-8");
            Trust::File(decode(file).ok_or_else(bad)?.into())
        }
    };
    config.ssl_mode(match mode {
        Some("disable") => SslMode::Disable,
        None | Some("prefer") => SslMode::Prefer,
        Some("require") => SslMode::Require,
        Some("verify-full") => {
            if options.trust == Trust::Anybody {
                options.trust = Trust::System;
            }
            SslMode::Require
        }
        Some(_) => {
            return Err(wrong("sslmode", "disable, prefer, require or verify-full"));
        }
    });
    if root == Some("system") {
        options.trust = Trust::System;
    }
    Ok((config, options))
}

/// The name of a setting, unless it is something else that went astray.
fn name_of(pair: &str) -> &str {
    let name = pair.split('=').next().unwrap_or_default();
    let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    if name.len() <= 32 && is_name(name) {
        name
    } else {
        "a setting that cannot be read"
    }
}

fn wrong(setting: &str, allowed: &str) -> Error {
    Error::invalid("url", setting, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::rules::issue::WhenBehind;

    fn of(query: &str) -> Result<(Config, PostgresOptions)> {
        parsed(&format!("postgres://ann:hunter2@db.example/app?{query}"))
    }

    #[test]
    fn a_setting_is_ours_or_the_servers() {
        let (config, options) =
            of("connect_timeout=3&namespace=billing&connections=2&schema=jobs").unwrap();
        assert_eq!(options.namespace.as_str(), "billing");
        assert_eq!((options.schema.as_str(), options.connections), ("jobs", 2));
        assert_eq!(config.get_dbname(), Some("app"));
        assert_eq!(
            config.get_connect_timeout(),
            Some(&std::time::Duration::from_secs(3))
        );
    }

    #[test]
    fn what_is_left_for_others_has_no_setting_of_ours() {
        for ours in OURS {
            let url = format!("postgres://ann:a%3Fb@db/app?x=1&{ours}=n&sslmode=require");
            let theirs = "postgres://ann:a%3Fb@db/app?x=1&sslmode=require";
            assert_eq!(PostgresOptions::server_url(&url), theirs);
            let url = format!("postgres:///app?{ours}=n");
            assert_eq!(PostgresOptions::server_url(&url), "postgres:///app");
        }
    }

    #[test]
    fn a_clock_is_strict_or_not_mentioned() {
        let of = |query| of(query).map(|(_, options)| options.when_behind);
        assert_eq!(of("").unwrap(), WhenBehind::GoOn);
        assert_eq!(of("clock=strict").unwrap(), WhenBehind::Refuse);
        let error = of("clock=lax").unwrap_err().to_string();
        assert!(
            error.contains("clock") && error.contains("strict"),
            "{error}"
        );
    }

    #[test]
    fn a_setting_that_nobody_knows_is_named() {
        for (query, named) in [
            ("connect_timeout=3&nonsense=1", Some("nonsense")),
            ("connect_timeout=soon", Some("connect_timeout")),
            ("hunter2=1", None),
        ] {
            let error = of(query).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{query}");
            let text = error.to_string();
            assert!(named.is_none_or(|named| text.contains(named)), "{text}");
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }

    #[test]
    fn what_is_to_be_encrypted_is_never_left_open() {
        let file = || Trust::File("/a b.pem".into());
        for (query, mode, trust) in [
            ("", SslMode::Prefer, Trust::Anybody),
            ("sslmode=disable", SslMode::Disable, Trust::Anybody),
            ("sslmode=require", SslMode::Require, Trust::Anybody),
            ("sslmode=verify-full", SslMode::Require, Trust::System),
            (
                "sslmode=require&sslrootcert=system",
                SslMode::Require,
                Trust::System,
            ),
            (
                "sslrootcert=/a%20b.pem&sslmode=verify-full",
                SslMode::Require,
                file(),
            ),
            (
                "sslmode=require&sslrootcert=/a%20b.pem",
                SslMode::Require,
                file(),
            ),
        ] {
            let (config, options) = of(query).unwrap();
            assert_eq!(
                (config.get_ssl_mode(), options.trust),
                (mode, trust),
                "{query}"
            );
        }
        for query in [
            "sslmode=verify-ca",
            "sslmode=",
            "sslcert=/me.pem",
            "sslrootcert=%2",
            "connections=0",
        ] {
            let error = of(query).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{query}");
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }
}
