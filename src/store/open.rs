//! Opening: a URL becomes a store.

use std::sync::Arc;

use super::{MemoryStore, Store};
#[cfg(feature = "sqlite")]
use crate::error::ErrorKind;
use crate::error::{Error, Result, Verb};
use crate::job::Namespace;
#[cfg(feature = "sqlite")]
use crate::limits::without_zero;

/// Opens the store that a URL names.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn Store>> {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    #[cfg(feature = "postgres")]
    if address.starts_with("postgres:") || address.starts_with("postgresql:") {
        // It has settings of its own: those of the server.
        return Ok(Arc::new(super::PostgresStore::open(url).await?));
    }
    match address.split_once(':') {
        Some(("memory", _)) => {
            Settings::parse(query)?;
            Ok(Arc::new(MemoryStore::new()))
        }
        #[cfg(feature = "sqlite")]
        Some(("sqlite", path)) => open_sqlite(path, Settings::parse(query)?).await,
        #[cfg(feature = "redis")]
        Some((scheme, _)) if scheme.starts_with("redis") => {
            Ok(Arc::new(super::RedisStore::open(redis_options(url)?)?))
        }
        other => {
            // A password may stand anywhere in it, also behind a `?`: only a scheme is shown.
            let scheme = other.map(|(scheme, _)| scheme).filter(|name| is_word(name));
            let found = match scheme {
                Some(scheme) => format!("scheme {scheme:?}"),
                None => "no scheme".into(),
            };
            let known = "memory:, sqlite://PATH, redis://HOST, rediss://HOST, redis+cluster://HOST, \
                         redis+sentinel://HOST, postgres://HOST/DATABASE";
            Err(Error::invalid("url", found, known).during(Verb::Open))
        }
    }
}

/// An unknown setting, for people. A password may have strayed into it: only a word is shown.
pub(super) fn setting_found(name: Option<&str>) -> String {
    match name.filter(|name| is_word(name)) {
        Some(name) => format!("setting {name:?}"),
        None => "a setting without a name".into(),
    }
}

/// Whether it looks like the name of a scheme or a setting, and not like a secret in its place.
fn is_word(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'+' | b'-' | b'.' | b'_');
    (1..=32).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
struct Settings {
    namespace: Namespace,
    synchronous_normal: bool,
    strict_clock: bool,
}

impl Settings {
    fn parse(query: &str) -> Result<Self> {
        let mut settings = Self {
            namespace: Namespace::default(),
            synchronous_normal: false,
            strict_clock: false,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("namespace", name)) => settings.namespace = Namespace::new(name)?,
                Some(("synchronous", "normal")) => settings.synchronous_normal = true,
                Some(("synchronous", "full")) => settings.synchronous_normal = false,
                Some(("clock", "strict")) => settings.strict_clock = true,
                _ => {
                    let found = setting_found(pair.split_once('=').map(|(key, _)| key));
                    let allowed = "namespace=NAME, synchronous=full|normal, clock=strict";
                    return Err(Error::invalid("url", found, allowed).during(Verb::Open));
                }
            }
        }
        Ok(settings)
    }
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(path: &str, settings: Settings) -> Result<Arc<dyn Store>> {
    use super::{SqliteOptions, SqliteStore};

    let path = path.strip_prefix("//").unwrap_or(path).to_owned();
    if path.is_empty() {
        return Err(Error::invalid("url", "no path", "sqlite://PATH").during(Verb::Open));
    }
    without_zero("url", &path).map_err(|e| e.during(Verb::Open))?;
    let mut options = SqliteOptions::default().namespace(settings.namespace);
    if settings.synchronous_normal {
        options = options.synchronous_normal();
    }
    if settings.strict_clock {
        options = options.strict_clock();
    }
    let open = tokio::task::spawn_blocking(move || SqliteStore::with(path, options));
    let store = open.await.map_err(|e| {
        Error::new(ErrorKind::Unexpected, "opening the store panicked")
            .caused_by(e)
            .during(Verb::Open)
    })??;
    Ok(Arc::new(store))
}

/// Settings that are not ours are passed on to the connection.
#[cfg(feature = "redis")]
pub(super) fn redis_options(url: &str) -> Result<super::RedisOptions> {
    use super::RedisOptions;

    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let is_ours = |pair: &&str| {
        let key = pair.split('=').next();
        matches!(key, Some("namespace" | "partitions" | "clock"))
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let (ours, theirs): (Vec<&str>, Vec<&str>) = pairs.partition(is_ours);
    let mut url = address.to_owned();
    for (at, pair) in theirs.into_iter().enumerate() {
        url.push(if at == 0 { '?' } else { '&' });
        url.push_str(pair);
    }
    let mut options = RedisOptions::new(url);
    for pair in ours {
        let wrong = |pair: &str, allowed: &str| {
            let found = setting_found(pair.split('=').next());
            Error::invalid("url", found, allowed).during(Verb::Open)
        };
        options = match pair.split_once('=') {
            Some(("namespace", name)) => options.namespace(Namespace::new(name)?),
            Some(("partitions", count)) => {
                let count = count
                    .parse()
                    .map_err(|_| wrong(pair, "partitions=1 to 64"))?;
                options.partitions(count)
            }
            Some(("clock", "strict")) => options.strict_clock(),
            _ => return Err(wrong(pair, "namespace=NAME, partitions=N, clock=strict")),
        };
    }
    Ok(options)
}

#[cfg(all(test, feature = "sqlite", feature = "redis"))]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_strict_or_not_mentioned() {
        assert!(Settings::parse("clock=strict").is_ok_and(|settings| settings.strict_clock));
        assert!(Settings::parse("").is_ok_and(|settings| !settings.strict_clock));
        assert!(redis_options("redis://host?clock=strict").is_ok());
        let refused = [
            Settings::parse("clock=lax").err(),
            redis_options("redis://host?clock=lax").err(),
        ];
        for error in refused {
            let error = error.expect("no such clock").to_string();
            assert!(
                error.contains("\"clock\"") && error.contains("clock=strict"),
                "{error}"
            );
        }
    }
}
