//! Making a connection: to one server, to the primary that sentinels name, to a cluster.

use std::path::Path;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo,
    IntoConnectionInfo as _, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisResult,
    TlsCertificates, Value,
};
use tokio::sync::mpsc::UnboundedSender;

use super::fault::explain;
use super::url::{Address, Host, Login, Servers};
use crate::error::{Error, ErrorKind, Result, Verb};

/// The cluster client repeats a call by itself, on another node if it must. Every mutating script
/// takes a request id, so that is safe; but a caller that waits should hear of trouble soon.
const CLUSTER_RETRIES: u32 = 3;

/// An open connection. Clones share it; it closes with the last.
#[derive(Clone)]
pub(super) enum Wire {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Knows where the servers are and how to get in.
pub(super) struct Dialer {
    address: Address,
    certificates: Option<TlsCertificates>,
}

impl Dialer {
    /// Reads the certificates that the address names.
    ///
    /// # Errors
    /// `InvalidInput` if one cannot be read.
    pub(super) fn new(address: Address) -> Result<Self> {
        let certificates = match &address.tls {
            None => None,
            Some(tls) => {
                // Without one of its own the application has none at all. If it has, the first
                // stays, and that is as well.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let client_tls = match (&tls.certificate, &tls.key) {
                    (Some(certificate), Some(key)) => Some(ClientTlsConfig {
                        client_cert: read("cert", certificate)?,
                        client_key: read("key", key)?,
                    }),
                    _ => None,
                };
                let root_cert = tls.ca.as_deref().map(|ca| read("ca", ca)).transpose()?;
                Some(TlsCertificates {
                    client_tls,
                    root_cert,
                })
            }
        };
        Ok(Self {
            address,
            certificates,
        })
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.address.servers, Servers::Cluster(_))
    }

    /// Makes a connection, or says why not.
    ///
    /// # Errors
    /// `Unavailable`, `Denied`, `InvalidInput`.
    pub(super) async fn dial(&self) -> Result<Wire> {
        match &self.address.servers {
            Servers::One(host) => self.one(host).await.map(Wire::One),
            Servers::Unix(path) => {
                let addr = ConnectionAddr::Unix(path.clone());
                let connection = self
                    .connect(addr, &self.address.login, self.address.db)
                    .await;
                connection.map(Wire::One).map_err(|error| explain(&error))
            }
            Servers::Cluster(hosts) => self.cluster(hosts).await.map(Wire::Cluster),
            Servers::Sentinel {
                sentinels,
                service,
                login,
            } => {
                let (_, connection) = self.primary(sentinels, service, login).await?;
                Ok(Wire::One(connection))
            }
        }
    }

    /// A connection to this one server.
    pub(super) async fn one(&self, host: &Host) -> Result<MultiplexedConnection> {
        let addr = self.addr(host);
        let connection = self
            .connect(addr, &self.address.login, self.address.db)
            .await;
        connection.map_err(|error| explain(&error))
    }

    /// A connection to one server on which it may speak unasked.
    pub(super) async fn listening(
        &self,
        pushes: &UnboundedSender<PushInfo>,
    ) -> Result<MultiplexedConnection> {
        let addresses = match &self.address.servers {
            Servers::One(host) => vec![self.addr(host)],
            Servers::Unix(path) => vec![ConnectionAddr::Unix(path.clone())],
            // What is published on one node is heard on all of them.
            Servers::Cluster(hosts) => hosts.iter().map(|host| self.addr(host)).collect(),
            Servers::Sentinel {
                sentinels,
                service,
                login,
            } => {
                let (host, _) = self.primary(sentinels, service, login).await?;
                vec![self.addr(&host)]
            }
        };
        let mut trouble = None;
        for addr in addresses {
            let pushes = Some(pushes.clone());
            let connection = self.connect_and_hear(addr, &self.address.login, 0, pushes);
            match connection.await {
                Ok(connection) => return Ok(connection),
                Err(error) => trouble = Some(explain(&error)),
            }
        }
        Err(trouble.unwrap_or_else(|| Error::new(ErrorKind::InvalidInput, "no host is named")))
    }

    /// Asks the sentinels, one after the other, for the primary, and believes it only if that
    /// server says so too: right after a failover some still name the old one.
    async fn primary(
        &self,
        sentinels: &[Host],
        service: &str,
        login: &Login,
    ) -> Result<(Host, MultiplexedConnection)> {
        let mut trouble = None;
        for sentinel in sentinels {
            match self.primary_by(sentinel, service, login).await {
                Ok(connection) => return Ok(connection),
                // What a server refuses says more than which sentinel is down.
                Err(error) if error.kind() == ErrorKind::Denied => return Err(error),
                Err(error) => trouble = Some(error),
            }
        }
        Err(trouble.unwrap_or_else(|| Error::new(ErrorKind::InvalidInput, "no sentinel is named")))
    }

    async fn primary_by(
        &self,
        sentinel: &Host,
        service: &str,
        login: &Login,
    ) -> Result<(Host, MultiplexedConnection)> {
        let below = |error| explain(&error);
        let mut asked = self
            .connect(self.addr(sentinel), login, 0)
            .await
            .map_err(below)?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let answer: Option<(String, u16)> = command.query_async(&mut asked).await.map_err(below)?;
        let Some((name, port)) = answer else {
            let why = format!("sentinel {sentinel} knows no primary of that name");
            return Err(Error::new(ErrorKind::Unavailable, why));
        };
        let host = Host { name, port };
        let mut connection = self.one(&host).await?;
        let role: Vec<Value> = redis::cmd("ROLE")
            .query_async(&mut connection)
            .await
            .map_err(below)?;
        if !matches!(role.first(), Some(Value::BulkString(role)) if role == b"master") {
            let why = format!("{host}, named by sentinel {sentinel}, is not the primary (yet)");
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        Ok((host, connection))
    }

    async fn cluster(&self, hosts: &[Host]) -> Result<ClusterConnection> {
        let timeout = self.address.timeout;
        let login = &self.address.login;
        let seeds = hosts
            .iter()
            .map(|host| Self::info(self.addr(host), login, 0));
        let seeds = seeds.collect::<RedisResult<Vec<_>>>();
        let seeds = seeds.map_err(|error| explain(&error))?;
        let mut builder = ClusterClientBuilder::new(seeds)
            .retries(CLUSTER_RETRIES)
            .min_retry_wait(10)
            .max_retry_wait(200)
            .connection_timeout(timeout)
            .response_timeout(timeout)
            .overall_response_timeout(Some(2 * timeout));
        if let Some(certificates) = &self.certificates {
            builder = builder.certs(certificates.clone());
        }
        let client = builder.build().map_err(|error| explain(&error))?;
        // Seeds that are down are tried one after the other.
        let patience = timeout * (1 + hosts.len() as u32);
        match tokio::time::timeout(patience, client.get_async_connection()).await {
            Ok(connection) => connection.map_err(|error| explain(&error)),
            Err(_) => Err(Error::new(
                ErrorKind::Unavailable,
                "no node of the cluster answered in time",
            )),
        }
    }

    fn addr(&self, host: &Host) -> ConnectionAddr {
        let (name, port) = (host.name.clone(), host.port);
        match &self.certificates {
            None => ConnectionAddr::Tcp(name, port),
            Some(_) => ConnectionAddr::TcpTls {
                host: name,
                port,
                insecure: false,
                tls_params: None,
            },
        }
    }

    fn info(addr: ConnectionAddr, login: &Login, db: u16) -> RedisResult<ConnectionInfo> {
        let mut settings = RedisConnectionInfo::default()
            .set_db(i64::from(db))
            .set_lib_name("leasehold", env!("CARGO_PKG_VERSION"));
        if let Some(user) = &login.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &login.password {
            settings = settings.set_password(password);
        }
        let info = addr.into_connection_info()?;
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
    }

    async fn connect(
        &self,
        addr: ConnectionAddr,
        login: &Login,
        db: u16,
    ) -> RedisResult<MultiplexedConnection> {
        self.connect_and_hear(addr, login, db, None).await
    }

    async fn connect_and_hear(
        &self,
        addr: ConnectionAddr,
        login: &Login,
        db: u16,
        pushes: Option<UnboundedSender<PushInfo>>,
    ) -> RedisResult<MultiplexedConnection> {
        let encrypted = matches!(addr, ConnectionAddr::TcpTls { .. });
        let mut info = Self::info(addr, login, db)?;
        let timeout = Some(self.address.timeout);
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(timeout)
            .set_response_timeout(timeout);
        if let Some(pushes) = pushes {
            // Only the third version of the protocol lets a server speak unasked.
            let settings = info.redis_settings().clone();
            info = info.set_redis_settings(settings.set_protocol(ProtocolVersion::RESP3));
            config = config.set_push_sender(pushes);
        }
        let client = match &self.certificates {
            Some(certificates) if encrypted => Client::build_with_tls(info, certificates.clone())?,
            _ => Client::open(info)?,
        };
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }
}

fn read(setting: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        let found = format!("{setting}={}, which cannot be read", path.display());
        Error::invalid("url", found, "a file in PEM form")
            .caused_by(error)
            .during(Verb::Open)
    })
}
