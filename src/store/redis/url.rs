//! Where the servers are, and how to get in: a URL, taken apart.
//!
//! | form | means |
//! |---|---|
//! | `redis://USER:PASSWORD@HOST:PORT/DB` | one server |
//! | `redis+sentinel://USER:PASSWORD@H1,H2,H3/SERVICE` | the primary that these sentinels name; the login is the primary's |
//! | `redis+cluster://USER:PASSWORD@H1,H2,H3` | the cluster that these nodes belong to |
//! | `redis+unix:///PATH` | one server, by its socket |
//! | `rediss://`, `rediss+sentinel://`, `rediss+cluster://` | the same with TLS |
//!
//! User and password are percent-decoded. Neither a password nor a whole URL is ever part of an
//! error or of a `Debug` text.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result, Verb};
use crate::store::percent;

const FORMS: &str = "redis://HOST, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST, \
                     redis+unix:///PATH, or rediss for TLS";

/// How long a server may take to answer before the call is given up, unless the URL says otherwise.
/// A lease of the shortest preset term, 10 s, is renewed after 3.3 s: a renewal that meets a dead
/// connection still has time for another.
const TIMEOUT: Duration = Duration::from_secs(4);

/// A URL, taken apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(crate) servers: Servers,
    pub(crate) login: Login,
    pub(crate) tls: Option<Tls>,
    pub(crate) db: u16,
    pub(crate) timeout: Duration,
    /// What is after the `?` and not the connection's business, in order.
    pub(crate) settings: Vec<(String, String)>,
}

/// Who to ask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Servers {
    One(Host),
    Unix(PathBuf),
    Sentinel {
        sentinels: Vec<Host>,
        service: String,
        login: Login,
    },
    Cluster(Vec<Host>),
}

/// A server's name or number, and its port.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) port: u16,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who we are. Shows whether there is a password, never which.
#[derive(Clone, PartialEq, Eq, Default)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "…");
        f.debug_struct("Login")
            .field("user", &self.user)
            .field("password", &password)
            .finish()
    }
}

/// Whom to trust, and who we are: files in PEM form.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Tls {
    /// Instead of the system's roots.
    pub(crate) ca: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

impl fmt::Display for Address {
    /// Where, without who.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |hosts: &[Host]| {
            let hosts: Vec<String> = hosts.iter().map(Host::to_string).collect();
            hosts.join(",")
        };
        let s = if self.tls.is_some() { "s" } else { "" };
        match &self.servers {
            Servers::One(host) => write!(f, "redis{s}://{host}"),
            Servers::Unix(path) => write!(f, "redis+unix://{}", path.display()),
            Servers::Cluster(hosts) => write!(f, "redis{s}+cluster://{}", join(hosts)),
            Servers::Sentinel {
                sentinels, service, ..
            } => {
                write!(f, "redis{s}+sentinel://{}/{service}", join(sentinels))
            }
        }
    }
}

fn wrong(found: impl fmt::Display, allowed: impl fmt::Display) -> Error {
    Error::invalid("url", found, allowed).during(Verb::Open)
}

impl Address {
    /// Takes a URL apart.
    ///
    /// # Errors
    /// `InvalidInput` that names the part at fault.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| wrong("no ://", FORMS))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (encrypted, form) = match scheme.split_once('+').unwrap_or((scheme, "")) {
            ("redis" | "valkey", form) => (false, form),
            ("rediss" | "valkeys", form) => (true, form),
            _ => return Err(wrong("another scheme", FORMS)),
        };
        let (place, path) = match rest.rfind('@') {
            // A password may hold a slash that nobody encoded.
            Some(at) => split_path(rest, at),
            None => split_path(rest, 0),
        };
        let (login, hosts) = match place.rsplit_once('@') {
            Some((login, hosts)) => (Login::parse(login)?, hosts),
            None => (Login::default(), place),
        };
        let mut address = Self {
            servers: Servers::Cluster(Vec::new()),
            login,
            tls: encrypted.then(Tls::default),
            db: 0,
            timeout: TIMEOUT,
            settings: Vec::new(),
        };
        let sentinel_login = address.take_settings(query)?;
        if form != "sentinel" && sentinel_login != Login::default() {
            return Err(wrong(
                "setting \"sentinel_user\" or \"sentinel_password\"",
                "only with redis+sentinel://",
            ));
        }
        match form {
            "" => {
                let mut hosts = parse_hosts(hosts, 6379)?;
                if hosts.len() != 1 {
                    let found = format!("{} hosts", hosts.len());
                    return Err(wrong(
                        found,
                        "one; several need redis+cluster or redis+sentinel",
                    ));
                }
                address.servers = Servers::One(hosts.remove(0));
                address.db = parse_db(path)?;
            }
            "cluster" => {
                if !path.is_empty() {
                    return Err(wrong("a database number", "none: a cluster has only one"));
                }
                address.servers = Servers::Cluster(parse_hosts(hosts, 6379)?);
            }
            "sentinel" => {
                let (service, db) = path.split_once('/').unwrap_or((path, ""));
                if service.is_empty() {
                    return Err(wrong("no service", "redis+sentinel://HOST,HOST/SERVICE"));
                }
                address.db = parse_db(db)?;
                address.servers = Servers::Sentinel {
                    sentinels: parse_hosts(hosts, 26379)?,
                    service: decode(service, "service")?,
                    login: sentinel_login,
                };
            }
            "unix" if encrypted || !hosts.is_empty() || path.is_empty() => {
                return Err(wrong("no absolute path, or TLS", "redis+unix:///PATH"));
            }
            "unix" => {
                let path = format!("/{}", decode(path, "path")?);
                address.servers = Servers::Unix(path.into());
            }
            _ => return Err(wrong("another scheme", FORMS)),
        }
        Ok(address)
    }

    /// Takes what is the connection's business out of the query; the sentinels' login is returned.
    fn take_settings(&mut self, query: &str) -> Result<Login> {
        let mut sentinel = Login::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decode(value, "setting")?;
            match name {
                "timeout" => self.timeout = parse_timeout(&value)?,
                "sentinel_user" => sentinel.user = Some(value),
                "sentinel_password" => sentinel.password = Some(value),
                "ca" | "cert" | "key" => {
                    let Some(tls) = &mut self.tls else {
                        let found = format!("setting {name:?} without TLS");
                        return Err(wrong(found, "only with rediss"));
                    };
                    let file = match name {
                        "ca" => &mut tls.ca,
                        "cert" => &mut tls.certificate,
                        _ => &mut tls.key,
                    };
                    *file = Some(value.into());
                }
                _ => self.settings.push((name.to_owned(), value)),
            }
        }
        if let Some(tls) = &self.tls
            && tls.certificate.is_some() != tls.key.is_some()
        {
            return Err(wrong("one of \"cert\" and \"key\"", "both or none"));
        }
        Ok(sentinel)
    }
}

impl Login {
    fn parse(text: &str) -> Result<Self> {
        let (user, password) = text.split_once(':').unwrap_or((text, ""));
        let some = |text: String| (!text.is_empty()).then_some(text);
        let login = Self {
            user: some(decode(user, "user")?),
            password: some(decode(password, "password")?),
        };
        if login.user.is_some() && login.password.is_none() {
            return Err(wrong(
                "a user without a password",
                "USER:PASSWORD@ or :PASSWORD@",
            ));
        }
        Ok(login)
    }
}

/// Splits at the first slash after `from`: what is before it, and what is behind.
fn split_path(text: &str, from: usize) -> (&str, &str) {
    match text[from..].find('/') {
        Some(at) => (&text[..from + at], &text[from + at + 1..]),
        None => (text, ""),
    }
}

fn parse_hosts(text: &str, port: u16) -> Result<Vec<Host>> {
    text.split(',').map(|host| parse_host(host, port)).collect()
}

fn parse_host(text: &str, default: u16) -> Result<Host> {
    let (name, port) = match text.strip_prefix('[') {
        Some(text) => match text.split_once(']') {
            Some((name, "")) => (name, None),
            Some((name, port)) => (name, Some(port.strip_prefix(':').unwrap_or("?"))),
            None => return Err(wrong("a host with [ and no ]", "[IPv6]:PORT")),
        },
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    if name.is_empty() {
        return Err(wrong("a host without a name", "HOST or HOST:PORT"));
    }
    let port = match port {
        None => default,
        Some(port) => match port.parse() {
            Ok(port) if port > 0 => port,
            _ => return Err(wrong("a port that is no number", "1 to 65535")),
        },
    };
    let name = name.to_owned();
    Ok(Host { name, port })
}

fn parse_db(text: &str) -> Result<u16> {
    match text {
        "" => Ok(0),
        number => number
            .parse()
            .map_err(|_| wrong("a database that is no number", "/0 to /65535")),
    }
}

/// Milliseconds with `ms`, or seconds with or without `s`.
fn parse_timeout(text: &str) -> Result<Duration> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let limit = Duration::from_millis(10)..=Duration::from_secs(600);
    let seconds = number.parse::<f64>().ok().map(|number| number * unit);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|timeout| limit.contains(timeout))
        .ok_or_else(|| wrong("setting \"timeout\"", "10ms to 600s"))
}

/// What is found is not shown: it may be a secret.
fn decode(text: &str, part: &str) -> Result<String> {
    percent::decode(text).ok_or_else(|| {
        wrong(
            format!("{part} with a bad %"),
            "% and two hex digits, UTF-8",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn host(name: &str, port: u16) -> Host {
        let name = name.to_owned();
        Host { name, port }
    }

    #[test]
    fn every_form_is_taken_apart() {
        let one = Address::parse("redis://app:p%40ss%2Fword@db.example:7000/3").unwrap();
        assert_eq!(one.servers, Servers::One(host("db.example", 7000)));
        assert_eq!(one.login.user.as_deref(), Some("app"));
        assert_eq!(one.login.password.as_deref(), Some("p@ss/word"));
        assert_eq!((one.db, one.tls, one.timeout), (3, None, TIMEOUT));

        let plain = Address::parse("redis://:a/b@c@[::1]").unwrap();
        assert_eq!(plain.servers, Servers::One(host("::1", 6379)));
        assert_eq!(plain.login.user, None);
        assert_eq!(plain.login.password.as_deref(), Some("a/b@c"));

        let tls = "rediss+cluster://a,b:1?ca=/x%20y.pem&namespace=shop&timeout=250ms";
        let tls = Address::parse(tls).unwrap();
        assert_eq!(
            tls.servers,
            Servers::Cluster(vec![host("a", 6379), host("b", 1)])
        );
        assert_eq!(tls.tls.unwrap().ca, Some("/x y.pem".into()));
        assert_eq!(tls.timeout, Duration::from_millis(250));
        assert_eq!(tls.settings, [("namespace".into(), "shop".into())]);

        let set = "redis+sentinel://u:p@a,b:5/jobs/2?sentinel_password=s%3D";
        let set = Address::parse(set).unwrap();
        let Servers::Sentinel {
            sentinels,
            service,
            login,
        } = set.servers
        else {
            panic!("{:?}", set.servers);
        };
        assert_eq!(sentinels, [host("a", 26379), host("b", 5)]);
        assert_eq!((service.as_str(), set.db), ("jobs", 2));
        assert_eq!(login.password.as_deref(), Some("s="));
        assert_eq!(set.login.password.as_deref(), Some("p"));

        let unix = Address::parse("redis+unix:///run/redis.sock").unwrap();
        assert_eq!(unix.servers, Servers::Unix("/run/redis.sock".into()));
    }

    #[test]
    fn what_is_wrong_is_named_and_secrets_are_not_shown() {
        for (url, named) in [
            ("redis:", "no ://"),
            ("http://hush", "another scheme"),
            ("redis+mesh://hush", "another scheme"),
            ("redis://u:hush@", "a host without a name"),
            ("redis://u:hush@h:port", "a port"),
            ("redis://u:hush@h:0", "a port"),
            ("redis://u:hush@h/x", "a database"),
            ("redis://u:hush@a,b", "2 hosts"),
            ("redis://u:hush%4@h", "password with a bad %"),
            ("redis://hush@h", "a user without a password"),
            ("redis://u:hush@[::1", "a host with ["),
            ("redis://u:hush@h?ca=f", "\"ca\" without TLS"),
            ("rediss://u:hush@h?cert=f", "\"cert\" and \"key\""),
            ("redis://u:hush@h?timeout=never", "\"timeout\""),
            ("redis://u:hush@h?sentinel_user=x", "\"sentinel_user\""),
            ("redis+cluster://u:hush@h/1", "a database number"),
            ("redis+sentinel://u:hush@h", "no service"),
            ("redis+unix://u:hush@h", "no absolute path"),
        ] {
            let error = Address::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert_eq!(error.field(), Some("url"), "{url}");
            let text = format!("{error} {error:?}");
            assert!(
                text.contains(named) || format!("{error}").contains(named),
                "{url}: {error}"
            );
            assert!(!text.contains("hush"), "{url}: {text}");
        }
        let address = "redis+sentinel://u:hush@h/s?sentinel_password=hush";
        let address = Address::parse(address).unwrap();
        assert!(!format!("{address:?} {address}").contains("hush"));
    }
}
