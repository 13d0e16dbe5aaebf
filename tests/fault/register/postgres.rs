//! A row of a PostgreSQL table.

use leasehold::fence::postgres::migrate;
use leasehold::{Context, Failure, FencingToken, async_trait};
use tokio_postgres::{Client, GenericClient, NoTls};

use super::{Names, Register};

pub(crate) struct Row {
    db: Client,
    table: String,
    key: i64,
}

impl Row {
    pub(crate) async fn connect(server: &str, table: &str, key: usize) -> Self {
        let (db, connection) = tokio_postgres::connect(server, NoTls).await.unwrap();
        tokio::spawn(connection);
        Self {
            db,
            table: table.to_owned(),
            key: key as i64,
        }
    }

    pub(crate) async fn create(server: &str, table: &str, key: usize) {
        let row = Self::connect(server, table, key).await;
        migrate(&row.db).await.unwrap();
        let sql = format!(
            "CREATE TABLE IF NOT EXISTS {table} (
                 key BIGINT PRIMARY KEY, names TEXT NOT NULL, mark BIGINT NOT NULL
             );
             INSERT INTO {table} (key, names, mark) VALUES ({key}, '[]', 0)"
        );
        row.db.batch_execute(&sql).await.unwrap();
    }
}

#[async_trait]
impl Register for Row {
    async fn read(&mut self) -> Names {
        select(&self.db, &self.table, self.key).await
    }

    async fn write(&mut self, names: &Names) {
        replace(&self.db, &self.table, self.key, names).await;
    }

    async fn write_checked(&mut self, token: FencingToken, names: &Names) -> bool {
        let tx = self.db.transaction().await.unwrap();
        let sql = format!(
            "UPDATE {} SET mark = $2 WHERE key = $1 AND mark <= $2",
            self.table
        );
        let token = token.get() as i64;
        let passed = tx.execute(&sql, &[&self.key, &token]).await.unwrap() == 1;
        if passed {
            replace(&tx, &self.table, self.key, names).await;
        }
        tx.commit().await.unwrap();
        passed
    }

    async fn open_and_read(&mut self, ctx: &Context) -> Result<Names, Failure> {
        let tx = self.db.transaction().await?;
        ctx.fence(&tx).await?;
        let names = select(&tx, &self.table, self.key).await;
        tx.commit().await?;
        Ok(names)
    }

    async fn write_fenced(&mut self, ctx: &Context, names: &Names) -> Result<bool, Failure> {
        let tx = self.db.transaction().await?;
        match ctx.fence(&tx).await {
            Ok(_) => replace(&tx, &self.table, self.key, names).await,
            Err(error) if error.stale().is_some() => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        tx.commit().await?;
        Ok(true)
    }
}

async fn select(db: &impl GenericClient, table: &str, key: i64) -> Names {
    let sql = format!("SELECT names FROM {table} WHERE key = $1");
    let row = db.query_one(&sql, &[&key]).await.unwrap();
    serde_json::from_str(row.get(0)).unwrap()
}

async fn replace(db: &impl GenericClient, table: &str, key: i64, names: &Names) {
    let names = serde_json::to_string(names).unwrap();
    let sql = format!("UPDATE {table} SET names = $2 WHERE key = $1");
    assert_eq!(db.execute(&sql, &[&key, &names]).await.unwrap(), 1);
}
