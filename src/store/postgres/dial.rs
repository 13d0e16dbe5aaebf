//! How a connection is encrypted, and whom it believes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{self, CryptoProvider};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::{Error, ErrorKind, Result};

/// Who must vouch for a server whose connection is encrypted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Trust {
    /// Nobody: what is sent cannot be read on the way, but who reads it at its end is not known.
    Anybody,
    /// The authorities that the system trusts.
    System,
    /// Those in a file.
    File(PathBuf),
}

/// Makes encrypted connections, where the server or the mode wants them.
pub(super) type Dial = MakeRustlsConnect;

/// Makes ready for encrypted connections.
pub(super) fn dial(trust: &Trust) -> Result<Dial> {
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| {
            Error::new(ErrorKind::Unexpected, "TLS is not available").caused_by(error)
        })?;
    let config = match trust {
        Trust::Anybody => config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unproven(provider))),
        Trust::System => config.with_root_certificates(system()?),
        Trust::File(file) => config.with_root_certificates(of_file(file)?),
    };
    Ok(Dial::new(config.with_no_client_auth()))
}

fn system() -> Result<RootCertStore> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let allowed = "a system with certificates of authorities, or sslrootcert=FILE";
        return Err(Error::invalid("url", "sslmode=verify-full", allowed));
    }
    Ok(roots)
}

fn of_file(file: &Path) -> Result<RootCertStore> {
    let bad = |error: &dyn std::fmt::Display| {
        let found = format!("sslrootcert {}: {error}", file.display());
        Error::invalid("url", found, "a file of certificates in PEM")
    };
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(file).map_err(|error| bad(&error))? {
        let root = root.map_err(|error| bad(&error))?;
        roots.add(root).map_err(|error| bad(&error))?;
    }
    if roots.is_empty() {
        return Err(bad(&"no certificate in it"));
    }
    Ok(roots)
}

/// Takes any certificate, as `sslmode=require` asks; the handshake itself is still checked.
#[derive(Debug)]
struct Unproven(Arc<CryptoProvider>);

impl ServerCertVerifier for Unproven {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
