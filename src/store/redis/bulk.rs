//! enqueue, in bulk: jobs by the hundred, past the scripts.
//!
//! The server's Lua reads every byte that it is given, which is two fifths of what an enqueue costs. So
//! a large one is a transaction: a script that checks the request, counts the jobs and puts the line under
//! a name that nothing else has; the segments, pushed to that name by a plain command that does nothing if there
//! is no such list; the script again, which stamps them; the line's own name back. What keeps the script from
//! beginning keeps out all that follows it.

use redis::{Cmd, Value};

use super::enqueue::{ENTRY, Items, START};
use super::queue::Partition;
use super::wire::{Out, garbled};
use super::{NOT_PLAIN, RedisStore};
use crate::error::{Result, Verb};
use crate::store::RequestId;

/// Segments that are stamped by one call: the server finds each from the end of the line.
const STAMPED: usize = 16;

/// Where the time goes that the store will fill in.
const NO_STAMP: &[u8] = &[0; 8];

/// The head of a segment, and all behind its start.
type Parts<'a> = (&'a [u8], &'a Vec<u8>);

impl RedisStore {
    /// Stores segments of one priority, and returns what the script said, as a plain one. Nothing, and
    /// nothing done, if the server does not take them so.
    pub(super) async fn store_bulk(
        &self,
        partition: &Partition,
        priority: u8,
        items: &Items,
        id: RequestId,
    ) -> Result<Option<Vec<u8>>> {
        let keys = partition.keys();
        let session = keys.session(id.session);
        let name = self.sending(keys, &session, id, Verb::Enqueue, 0).await?;
        let ([meta, doze, line], fill) = (keys.bulk(priority), &keys.fill());
        let heads = items.entries.0.chunks(ENTRY).map(|entry| &entry[2..]);
        let segments: Vec<Parts> = heads.zip(&items.args).collect();
        let Some(((head, rest), others)) = segments.split_first() else {
            return Ok(None);
        };

        let mut first = Out::default();
        first.u8(priority).u32(items.jobs).raw(head);
        let checked = self.bulk_script(&[meta, &session, doze, fill, line], [&name, &first.0]);
        let mut commands = vec![checked];
        // The first start comes with the script, all others with the rests before them.
        let mut groups = others.chunks(STAMPED);
        self.push_segments(
            &mut commands,
            fill,
            Some(rest),
            groups.next().unwrap_or(&[]),
        );
        for group in groups {
            self.push_segments(&mut commands, fill, None, group);
        }
        let mut rename = redis::cmd("RENAMENX");
        rename.arg(fill).arg(line);
        commands.push(rename);

        let script = &self.scripts().enqueue_bulk;
        let Some(answers) = self.link.transact(script, commands).await? else {
            return Ok(None);
        };
        let mut answers = answers.into_iter();
        let Some(Value::BulkString(answer)) = answers.next() else {
            return Err(garbled());
        };
        let is_done = |answer| matches!(answer, Value::Int(1..) | Value::BulkString(_));
        if answer != NOT_PLAIN && !answers.all(is_done) {
            return Err(garbled());
        }
        Ok(Some(answer))
    }

    /// Adds the commands that push segments and have them stamped.
    fn push_segments(
        &self,
        commands: &mut Vec<Cmd>,
        fill: &[u8],
        rest: Option<&Vec<u8>>,
        others: &[Parts],
    ) {
        let bytes = others.iter().map(|(_, rest)| START + rest.len());
        let bytes = rest.map_or(0, Vec::len) + bytes.sum::<usize>() + fill.len();
        let mut push = Cmd::with_capacity(3 + 2 * others.len(), bytes + "RPUSHX".len());
        push.arg("RPUSHX").arg(fill).arg(rest);
        for (head, rest) in others {
            push.arg([head, NO_STAMP].concat()).arg(rest);
        }
        commands.push(push);
        if !others.is_empty() {
            let heads: Vec<&[u8]> = others.iter().map(|(head, _)| *head).collect();
            commands.push(self.bulk_script(&[fill], [b"", &heads.concat()]));
        }
    }

    fn bulk_script(&self, keys: &[&[u8]], [one, two]: [&[u8]; 2]) -> Cmd {
        let script = &self.scripts().enqueue_bulk;
        match self.shown() {
            None => script.with(keys, &[one, two]),
            Some(shown) => script.with(keys, &[one, two, shown.as_bytes()]),
        }
    }
}
