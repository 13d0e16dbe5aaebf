// A producer and a worker in JavaScript (Node, package pg), in their own transactions.
//
// Run it: DATABASE_URL=postgres://… node examples/clients/worker.js

const { Client } = require("pg");

async function main() {
  const db = new Client({ connectionString: process.env.DATABASE_URL });
  await db.connect();
  const table = "CREATE TABLE IF NOT EXISTS node_orders (id int PRIMARY KEY, paid boolean NOT NULL DEFAULT false)";
  await db.query(table);

  const transaction = async (steps) => {
    await db.query("BEGIN");
    try {
      await steps();
      await db.query("COMMIT");
    } catch (error) {
      await db.query("ROLLBACK");
      throw error;
    }
  };

  // The order and its job, or neither.
  const place = (order, fails) =>
    transaction(async () => {
      await db.query("INSERT INTO node_orders VALUES ($1)", [order]);
      await db.query("SELECT leasehold.enqueue('node', 'charge', $1)", [{ order }]);
      if (fails) throw new Error("no");
    });

  const claim = async (owner, term) => {
    const claimed = "SELECT receipt, payload, attempt, checkpoint FROM leasehold.claim(ARRAY['node'], 1, $1, $2)";
    return (await db.query(claimed, [owner, term])).rows[0];
  };

  // The effect and the end of the job, or neither.
  const charge = ({ receipt, payload }) =>
    transaction(async () => {
      await db.query("SELECT leasehold.begin($1)", [receipt]); // its limits follow the lease
      await db.query("UPDATE node_orders SET paid = true WHERE id = $1", [payload.order]);
      await db.query("SELECT leasehold.complete($1)", [receipt]);
    });

  await place(1, true).catch(() => {});
  await place(2, false);

  const old = await claim("node-old", "1 second");
  await new Promise((awake) => setTimeout(awake, 1200)); // it stands still for longer than its lease lasts

  // The next run saves how far it came, and fails: the job comes back with what was saved.
  const failing = await claim("node-new", "1 minute");
  await db.query("SELECT leasehold.checkpoint($1, 1, $2)", [failing.receipt, { asked: "the bank" }]);
  const fail = "SELECT leasehold.fail($1, 'the bank is closed', interval '0') AS state";
  const { state } = (await db.query(fail, [failing.receipt])).rows[0];
  console.log(`failed: ${state}, attempt ${failing.attempt}`);

  const job = await claim("node-next", "1 minute");
  await charge(job);
  console.log(`paid: order ${job.payload.order}, attempt ${job.attempt}, asked ${job.checkpoint.asked}`);

  // The old one wakes up: whatever it tries, the server ends its transaction.
  for (const late of ["complete($1)", "fail($1, 'late')", "checkpoint($1, 9, '1')"]) {
    const tried = transaction(async () => {
      await db.query("UPDATE node_orders SET paid = false");
      await db.query(`SELECT leasehold.${late}`, [old.receipt]);
    });
    await tried.catch((error) => console.log("refused:", late.split("(")[0], error.code));
  }
  const { rows } = await db.query("SELECT id, paid FROM node_orders");
  console.log("orders:", JSON.stringify(rows));
  await db.end();
}

main();
