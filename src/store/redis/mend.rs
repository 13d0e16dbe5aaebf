//! What a server lost, found and put back: single keys deleted by hand or evicted.
//!
//! `jobs` has the state and the place of every job. Whatever else is missing can be made from it,
//! but for the terms of leases: those end, and their jobs are claimed again. What `jobs` itself
//! lost is gone, and only counted. Workers may go on all the while: what is found is looked at
//! again in the step that puts it back, and the ledger is corrected by the difference that was
//! counted, so that what is granted and settled meanwhile stays in it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redis::Value;

use super::RedisStore;
use super::doctor::partitions_there;
use super::inspect::{LEDGER, LOSSES};
use super::keys::{LINES, line};
use super::link::Function;
use super::queue::{Partition, Queue};
use super::wire::{In, garbled};
use crate::error::{Result, Verb};
use crate::store::health::Finding;
use crate::store::open::redis_options;

/// Jobs that one step puts back.
const CHUNK: usize = 100;
/// Jobs that one step looks at: at first, and at most; and bytes of them, about.
const LOOKED: [usize; 2] = [10, 200];
const LOOKED_BYTES: usize = 256 << 10;
/// Stubs of a line that are read at once.
const STUBS: isize = 1_000;
/// Members of other keys that are looked at in one step, about; and which keys: first those with a
/// member for each of some jobs.
const MEMBERS: usize = 500;
const ORPHANS: [&str; 9] = [
    "due", "park", "done", "dead", "gone", "keep", "uniq", "excl", "uwin",
];
/// Grants that one step counts, attempt by attempt: if leases begin or end meanwhile it all begins
/// again, and a larger step has a better chance.
const GRANTS: [usize; 8] = [250, 250, 500, 500, 1_000, 1_000, 2_000, 2_000];
/// An id, a state, a place.
const ROW: usize = 25;

type Place = [u8; ROW];

/// Live leases by the ledger, and those that are there.
#[derive(Clone, Copy, Default)]
pub(super) struct Leases {
    pub(super) counted: i64,
    pub(super) there: i64,
}

/// What is wrong in a store.
#[derive(Default)]
struct Losses {
    /// Queues that have jobs and are not on the list.
    unlisted: usize,
    /// Jobs that stand where nobody finds them.
    stranded: u64,
    /// Keys that jobs hold which are gone, and ends of windows and of retentions that are missing.
    loose: u64,
    /// Jobs, grants, books, notes and unique keys of which only the loss is known.
    counted: [u64; LOSSES],
    /// By how much the ledger's live leases and those that are there differ.
    apart: u64,
    /// Partitions in which leases began and ended too fast to be counted.
    busy: u64,
}

impl RedisStore {
    /// Looks for what was lost; puts back what can be.
    async fn losses(&self, mends: bool) -> Result<Losses> {
        let mut losses = Losses::default();
        let mut partitions = self.all_partitions().await?;
        let unlisted = self.unlisted().await?;
        losses.unlisted = unlisted.len();
        for queue in unlisted {
            if mends {
                let partitions = queue.partitions.len() as u16;
                self.write_queue(&(queue.name.clone(), partitions)).await?;
            }
            partitions.extend(queue.all(0));
        }
        let how: &[u8] = if mends { b"mend" } else { b"look" };
        for partition in partitions {
            let suspects = self.stranded(&partition).await?;
            for chunk in suspects.chunks(CHUNK) {
                let function = &self.functions().mend;
                let args: [&[u8]; 2] = [&chunk.concat(), how];
                let mut reply = self.look(function, partition.keys(), &args).await?;
                losses.stranded += reply.body.u64()?;
            }
            let mut orphans = [0; ORPHANS.len()];
            for (which, count) in ORPHANS.iter().zip(&mut orphans) {
                *count = self.orphans(&partition, which, how).await?;
            }
            let [ref of_jobs @ .., keep, uniq, excl, windows] = orphans;
            losses.loose += keep + uniq + excl;
            let mut counted = self.counted(&partition).await?;
            let found = self.leases_in(&partition).await?;
            losses.busy += u64::from(found.is_none());
            let found = found.unwrap_or_default();
            let apart = found.counted - found.there;
            losses.apart += apart.unsigned_abs();
            if mends && (apart != 0 || counted != [0; LOSSES]) {
                let numbers = [apart].into_iter().chain(counted.map(|count| count as i64));
                let texts: Vec<String> = numbers.map(|number| number.to_string()).collect();
                let args: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
                let function = &self.functions().recount;
                self.look(function, partition.keys(), &args).await?;
            }
            if !mends {
                // A step that drops them counts them, too.
                counted[0] += of_jobs.iter().sum::<u64>();
                counted[LOSSES - 1] += windows;
            }
            for (sum, count) in losses.counted.iter_mut().zip(counted) {
                *sum += count;
            }
        }
        Ok(losses)
    }

    /// Queues that have keys and are not on the list, as they were made.
    async fn unlisted(&self) -> Result<Vec<Arc<Queue>>> {
        let listed = self.all_queues().await?;
        let mut unlisted = BTreeMap::new();
        for (name, number) in partitions_there(&self.shared.options).await? {
            if listed.iter().all(|queue| queue.name != name) {
                let partitions = unlisted.entry(name).or_insert(0);
                *partitions = number.saturating_add(1).max(*partitions);
            }
        }
        let namespace = &self.shared.options.namespace;
        let mut queues = Vec::with_capacity(unlisted.len());
        for (name, mut partitions) in unlisted {
            // Those that were never used have no keys; those that were say how many there are.
            for partition in Queue::new(namespace, &name, partitions).all(0) {
                partitions = partitions.max(self.made_with(&partition).await?);
            }
            queues.push(Queue::new(namespace, &name, partitions));
        }
        Ok(queues)
    }

    /// What was lost, as far as it has been noticed.
    async fn counted(&self, partition: &Partition) -> Result<[u64; LOSSES]> {
        let meta = &partition.keys().meta;
        let mut get = redis::cmd("HMGET");
        get.arg(meta).arg(&LEDGER[LEDGER.len() - LOSSES..]);
        let answer = self.link.run(meta, get).await?;
        let texts: Vec<Option<String>> = redis::from_redis_value(answer).map_err(|_| garbled())?;
        let mut fields = [0; LOSSES];
        for (field, text) in fields.iter_mut().zip(texts) {
            *field = text.and_then(|text| text.parse().ok()).unwrap_or(0);
        }
        Ok(fields)
    }

    /// Live leases of one moment; none if there was no such moment.
    pub(super) async fn leases_in(&self, partition: &Partition) -> Result<Option<Leases>> {
        for grants in GRANTS {
            let (mut first, mut is_steady) = (None, true);
            let mut there = HashMap::new();
            let function = &self.functions().leases;
            self.scan(function, partition, grants, &[], |mut body| {
                let books = (body.u64()?, body.u64()?);
                is_steady &= *first.get_or_insert(books) == books;
                while !body.is_empty() {
                    there.insert(body.grant()?, body.u16()?);
                }
                Ok(grants)
            })
            .await?;
            if let Some((granted, ended)) = first.filter(|_| is_steady) {
                return Ok(Some(Leases {
                    counted: granted.cast_signed() - ended.cast_signed(),
                    there: there.into_values().map(|alive: usize| alive as i64).sum(),
                }));
            }
        }
        Ok(None)
    }

    /// Goes through a key with a function that takes a cursor and how many, and answers with the
    /// next one behind what it found. `take` says how many to ask for next.
    async fn scan(
        &self,
        function: &Function,
        partition: &Partition,
        mut count: usize,
        more: &[&[u8]],
        mut take: impl FnMut(In) -> Result<usize>,
    ) -> Result<()> {
        let mut cursor = b"0".to_vec();
        loop {
            let asked = count.to_string();
            let mut args: Vec<&[u8]> = vec![&cursor, asked.as_bytes()];
            args.extend(more);
            let mut body = self.look(function, partition.keys(), &args).await?.body;
            let answer = body.rest();
            let length = usize::from(*answer.last().ok_or_else(garbled)?);
            let rows = (answer.len() - 1).checked_sub(length).ok_or_else(garbled)?;
            let next = answer.slice(rows..answer.len() - 1).to_vec();
            count = take(In::new(answer.slice(..rows)))?;
            if next == b"0" {
                return Ok(());
            }
            cursor = next;
        }
    }

    /// What one key has of jobs and keys that are gone.
    async fn orphans(&self, partition: &Partition, which: &str, how: &[u8]) -> Result<u64> {
        let (function, mut found) = (&self.functions().orphans, 0);
        let more = [which.as_bytes(), how];
        let [mut count, _] = LOOKED;
        self.scan(function, partition, count, &more, |mut body| {
            found += body.u64()?;
            count = next_count(count, MEMBERS, body.u32()?);
            Ok(count)
        })
        .await?;
        Ok(found)
    }

    /// Jobs that may stand where nobody finds them: first those that hold keys or should be in
    /// line, in the order in which they came.
    async fn stranded(&self, partition: &Partition) -> Result<Vec<Place>> {
        let (mut stranded, mut in_line) = (Vec::new(), HashMap::new());
        let [mut count, most] = LOOKED;
        let census = &self.functions().census;
        self.scan(census, partition, count, &[], |mut body| {
            let bytes = body.u32()?;
            for row in body.rest().chunks_exact(ROW) {
                let row: Place = row.try_into().map_err(|_| garbled())?;
                if row[16] == b'r' {
                    in_line.insert([&row[17..], &row[..16]].concat(), row);
                } else {
                    stranded.push(row);
                }
            }
            count = next_count(count, most, bytes);
            Ok(count)
        })
        .await?;
        self.not_in_line(partition, &mut in_line).await?;
        stranded.extend(in_line.into_values());
        stranded.sort_by_key(|row| (row[16] == b'p', row[17..].to_vec()));
        Ok(stranded)
    }

    /// Drops those that the lines have. A line is read from its end: jobs leave it at the front,
    /// and so none that stays is passed by.
    async fn not_in_line(
        &self,
        partition: &Partition,
        in_line: &mut HashMap<Vec<u8>, Place>,
    ) -> Result<()> {
        for at in 0..LINES {
            let key = partition.keys().named(&line(at));
            let mut last = -1;
            while !in_line.is_empty() {
                let mut range = redis::cmd("LRANGE");
                range.arg(&key).arg(last + 1 - STUBS).arg(last);
                let Value::Array(some) = self.link.run(&key, range).await? else {
                    return Err(garbled());
                };
                let is_all = (some.len() as isize) < STUBS;
                for stub in some {
                    let stub: Vec<u8> = redis::from_redis_value(stub).map_err(|_| garbled())?;
                    in_line.remove(&stub);
                }
                if is_all {
                    break;
                }
                last -= STUBS;
            }
        }
        Ok(())
    }

    /// What the server lost, as a finding.
    pub(super) async fn lost(&self) -> Finding {
        const CHECK: &str = "losses";
        match self.losses(false).await {
            Ok(losses) if losses.is_nothing() => Finding::fine(CHECK, "every job is in its place"),
            Ok(losses) => Finding::risk(
                CHECK,
                losses.told(),
                "keys of the store were evicted or deleted by hand: find out by whom, then run \
                 `leasehold doctor --repair`",
            ),
            Err(_) => Finding::unseen(CHECK, "the rights of the store, and +scan"),
        }
    }
}

/// How many to look at in the next step, after one that looked at so many bytes.
fn next_count(count: usize, most: usize, bytes: usize) -> usize {
    if bytes > LOOKED_BYTES {
        (count / 2).max(1)
    } else {
        (count * 2).min(most)
    }
}

impl Losses {
    fn is_nothing(&self) -> bool {
        let Self {
            unlisted,
            stranded,
            loose,
            counted,
            apart,
            busy: _,
        } = self;
        *unlisted == 0 && [*stranded, *loose, *apart] == [0; 3] && *counted == [0; LOSSES]
    }

    fn told(&self) -> String {
        let [jobs, grants, books, notes, keys] = self.counted;
        let mut told = format!(
            "{} queues not on the list; {} jobs where nobody finds them; {} keys nobody frees; lost: \
             {jobs} jobs, {grants} grants, {books} times the books, {notes} notes of leases, {keys} \
             unique keys; the ledger is {} leases off",
            self.unlisted, self.stranded, self.loose, self.apart
        );
        if self.busy > 0 {
            let more = format!("; {} partitions were too busy to count leases", self.busy);
            told.push_str(&more);
        }
        told
    }
}

/// Puts jobs back to where they belong, and counts anew. Returns what there was to do.
///
/// # Errors
/// As for opening a store and for any call. Call again: what has been done is not done twice.
pub async fn repair(url: &str) -> Result<Finding> {
    const CHECK: &str = "repair";
    let store = RedisStore::open(redis_options(url)?)?;
    let at = super::at(Verb::Control);
    let losses = store.losses(true).await.map_err(at)?;
    if losses.is_nothing() {
        return Ok(Finding::fine(CHECK, "nothing was missing"));
    }
    let advice = if losses.busy > 0 {
        "where leases could not be counted the ledger is as it was: pause the queue and repair again"
    } else {
        "jobs that were put back run again; jobs that were lost are gone"
    };
    Ok(Finding::note(CHECK, losses.told(), advice))
}
