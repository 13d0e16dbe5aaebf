"""A producer and a worker in Python (psycopg 3), in their own transactions.

Run it: DATABASE_URL=postgres://… python3 examples/clients/worker.py
"""

import os
import time

import psycopg

db = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
db.execute("CREATE TABLE IF NOT EXISTS python_orders (id int PRIMARY KEY, paid boolean NOT NULL DEFAULT false)")


def place(order: int, *, fail: bool = False) -> None:
    """The order and its job, or neither."""
    with db.transaction():
        db.execute("INSERT INTO python_orders VALUES (%s)", [order])
        db.execute("SELECT leasehold.enqueue('python', 'charge', jsonb_build_object('order', %s::int))", [order])
        if fail:
            raise RuntimeError("no")


def claim(owner: str, term: str = "1 minute"):
    claimed = "SELECT receipt, payload, attempt, checkpoint FROM leasehold.claim(ARRAY['python'], 1, %s, %s::interval)"
    return db.execute(claimed, [owner, term]).fetchone()


def charge(receipt: str, order: int) -> None:
    """The effect and the end of the job, or neither."""
    with db.transaction():
        db.execute("SELECT leasehold.begin(%s)", [receipt])  # its limits follow the lease
        db.execute("UPDATE python_orders SET paid = true WHERE id = %s", [order])
        db.execute("SELECT leasehold.complete(%s)", [receipt])


try:
    place(1, fail=True)
except RuntimeError:
    pass
place(2)

old, payload, attempt, saved = claim("python-old", "1 second")
time.sleep(1.2)  # it stands still for longer than its lease lasts

# The next run saves how far it came, and fails: the job comes back with what was saved.
receipt, payload, attempt, saved = claim("python-new")
db.execute("SELECT leasehold.checkpoint(%s, 1, %s)", [receipt, '{"asked": "the bank"}'])
state = db.execute("SELECT leasehold.fail(%s, 'the bank is closed', interval '0')", [receipt]).fetchone()[0]
print(f"failed: {state}, attempt {attempt}")

receipt, payload, attempt, saved = claim("python-next")
charge(receipt, payload["order"])
print(f"paid: order {payload['order']}, attempt {attempt}, asked {saved['asked']}")

# The old one wakes up: whatever it tries, the server ends its transaction.
for late in ["complete(%s)", "fail(%s, 'late')", "checkpoint(%s, 9, '1')"]:
    try:
        with db.transaction():
            db.execute("UPDATE python_orders SET paid = false")
            db.execute("SELECT leasehold." + late, [old])
    except psycopg.Error as error:
        print("refused:", late.split("(")[0], error.sqlstate)
print("orders:", db.execute("SELECT id, paid FROM python_orders").fetchall())
