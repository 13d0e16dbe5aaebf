//! Certificates of our own making.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

/// Somebody who says who is who: a root that nobody else trusts.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    root: PathBuf,
    place: PathBuf,
}

impl Authority {
    /// A new one, whose files are under `place`.
    pub fn new(place: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let root = place.join(format!("{name}.pem"));
        fs::write(&root, params.self_signed(&key).unwrap().pem()).unwrap();
        Self {
            issuer: Issuer::new(params, key),
            root,
            place: place.to_owned(),
        }
    }

    /// The file to trust.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A certificate for a host, valid or long expired: the files of certificate and key.
    pub fn issue(&self, host: &str, expired: bool) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        if expired {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |what: &str| self.place.join(format!("{host}-{expired}-{what}.pem"));
        let files = (file("certificate"), file("key"));
        fs::write(&files.0, certificate.pem()).unwrap();
        fs::write(&files.1, key.serialize_pem()).unwrap();
        files
    }
}
