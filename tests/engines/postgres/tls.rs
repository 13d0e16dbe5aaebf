//! Encrypted connections, and servers that cannot prove who they are.

use std::time::Duration;

use leasehold::store::PostgresStore;
use leasehold::{ErrorKind, Store};

use crate::postgres::certs::Authority;
use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, answered};

/// How many of the store's connections are encrypted, and how many are not.
async fn encrypted(server: &Server) -> (i64, i64) {
    let sql = "SELECT count(*) FILTER (WHERE s.ssl), count(*) FILTER (WHERE NOT s.ssl)
               FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid)
               WHERE a.application_name = 'leasehold'";
    let row = server.client().await.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_server_must_prove_who_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ours");
    let stranger = Authority::new(dir.path(), "theirs");
    let (certificate, key) = authority.issue("localhost", false);
    let server = Server::start_tls(&certificate, &key);
    let plain = server.url();
    let named = plain.replace("127.0.0.1", "localhost");
    let proven = format!(
        "sslmode=verify-full&sslrootcert={}",
        authority.root().display()
    );

    let store = PostgresStore::open(&format!("{named}?{proven}"))
        .await
        .unwrap();
    let mut caller = Caller::new(store.clone()).await;
    caller.enqueue(1).await;
    assert!(caller.claim_one(Duration::from_secs(60)).await.is_some());
    // The renewer's connections and the one that listens are encrypted as well.
    let dedicated = store.dedicated().await.unwrap();
    answered(|| dedicated.open_session()).await;
    let listening = tokio::spawn({
        let (store, queues) = (store.clone(), [leasehold::job::QueueName::default()]);
        async move { store.wait(&queues, false, Duration::from_secs(600)).await }
    });
    while encrypted(&server).await.0 < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(encrypted(&server).await.1, 0);
    listening.abort();

    let refused = [
        // The name in the certificate is another.
        format!("{plain}?{proven}"),
        format!(
            "{named}?sslmode=verify-full&sslrootcert={}",
            stranger.root().display()
        ),
        // The system does not know our authority.
        format!("{named}?sslmode=verify-full"),
        // A file that was given is not given for nothing.
        format!(
            "{named}?sslmode=require&sslrootcert={}",
            stranger.root().display()
        ),
    ];
    for url in refused {
        let error = PostgresStore::open(&url).await.unwrap_err();
        // A system without authorities says so.
        let kinds = [ErrorKind::Unsupported, ErrorKind::InvalidInput];
        assert!(kinds.contains(&error.kind()), "{url}: {error:?}");
    }
    let error = PostgresStore::open(&format!("{named}?sslrootcert=/nowhere.pem")).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    PostgresStore::open(&format!("{plain}?sslmode=require"))
        .await
        .unwrap();

    // The control arm: only who says so is not encrypted.
    drop((store, caller, dedicated));
    let open = PostgresStore::open(&format!("{plain}?sslmode=disable")).await;
    let open = Caller::new(open.unwrap()).await;
    assert!(encrypted(&server).await.1 > 0);
    drop(open);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_certificate_of_the_past_proves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ours");
    let (certificate, key) = authority.issue("localhost", true);
    let server = Server::start_tls(&certificate, &key);
    let url = server.url().replace("127.0.0.1", "localhost");
    let root = authority.root().display();
    let url = format!("{url}?sslmode=verify-full&sslrootcert={root}");
    let error = PostgresStore::open(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_to_be_encrypted_is_refused_where_it_cannot_be() {
    let url = shared().url();
    for mode in ["require", "verify-full"] {
        let error = PostgresStore::open(&format!("{url}?sslmode={mode}")).await;
        let error = error.unwrap_err();
        assert!(!error.is_transient(), "{error:?}");
        assert!(error.to_string().contains("sslmode"), "{error}");
    }
    PostgresStore::open(&format!("{url}?sslmode=prefer"))
        .await
        .unwrap();
}
