//! control: what operators do, each time on record.

use tokio_postgres::GenericClient;

use super::fault::{Done, corrupt, garbled};
use super::place::Place;
use super::tally::Count;
use super::tx::{GrantKey, Tx, args, time, uuid};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::{JobId, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits::AUDIT_TOKENS;
use crate::rules::ends::{self, Next};
use crate::store::sql::view::state_code;
use crate::store::{ControlCommand, ControlRequest, Controlled, LeaseSelect, Select};

/// A selected job; of a leased one it is known where.
type Selected = (JobId, Option<Place>);

/// What to do with each selected job.
#[derive(Clone, Copy)]
enum Act {
    Cancel,
    Purge,
    Reschedule(Timestamp),
    RetryDead,
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn control(&mut self, request: &ControlRequest) -> Done<Controlled> {
        let ((), recalled, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            async {
                let args = args![self.base.namespace => TEXT];
                self.rows("queues_lock_all", args).await
            },
            self.clock()
        )?;
        self.now = now;
        if let Some(first) = self.recalled(request.request, Verb::Control, &recalled)? {
            return serde_json::from_slice(&first).map_err(|_| garbled());
        }
        self.keep(&queues)?;
        let mut tokens = Vec::new();
        let answer = match &request.command {
            ControlCommand::Pause(queue) => self.set_paused(queue, true).await?,
            ControlCommand::Resume(queue) => self.set_paused(queue, false).await?,
            ControlCommand::Configure { queue, relaxed } => {
                let queue = self.queue(queue).await?;
                self.queues[queue].relaxed = *relaxed;
                self.save_queue(queue).await?
            }
            ControlCommand::Revoke(leases) => {
                self.revoke(leases, &request.reason, &mut tokens).await?
            }
            ControlCommand::Cancel(jobs) => self.each(jobs, Act::Cancel).await?,
            ControlCommand::Purge(jobs) => self.each(jobs, Act::Purge).await?,
            ControlCommand::Reschedule { jobs, delay } => {
                self.each(jobs, Act::Reschedule(now.after(*delay))).await?
            }
            ControlCommand::RetryDead(jobs) => self.each(jobs, Act::RetryDead).await?,
        };
        let tokens = serde_json::to_string(&tokens).map_err(|_| garbled())?;
        let args = args![self.base.namespace => TEXT, time(now) => INT8, request.actor => TEXT,
                         request.reason => TEXT, request.command.to_string() => TEXT,
                         answer.done as i64 => INT8, tokens => TEXT];
        self.run("audit_new", args).await?;
        let written = serde_json::to_vec(&answer).map_err(|_| garbled())?;
        self.remember(request.request, Verb::Control, written);
        Ok(answer)
    }

    async fn set_paused(&mut self, queue: &QueueName, paused: bool) -> Done<Controlled> {
        let at = self.queue(queue).await?;
        self.queues[at].paused = paused;
        if !paused {
            self.bells.push((queue.clone(), false, usize::MAX));
            self.bells.push((queue.clone(), true, usize::MAX));
        }
        self.save_queue(at).await
    }

    async fn save_queue(&mut self, queue: usize) -> Done<Controlled> {
        let at = &self.queues[queue];
        let args = args![at.id => INT4, at.paused => BOOL, at.relaxed => BOOL];
        self.run("queue_set", args).await?;
        Ok(Controlled {
            done: 1,
            ..Controlled::default()
        })
    }

    async fn selected(&mut self, jobs: &Select) -> Done<Vec<Selected>> {
        match jobs {
            Select::Job(id) => {
                let place = self.find(*id).await?;
                Ok(place.map(|place| (*id, Some(place))).into_iter().collect())
            }
            Select::State { queue, state, max } => match self.known(queue) {
                Some(queue) => self.in_state(queue, *state, *max).await,
                None => Ok(Vec::new()),
            },
        }
    }

    /// The jobs of a queue in a state, in the order in which an inspection lists them.
    async fn in_state(&mut self, queue: usize, state: JobState, max: usize) -> Done<Vec<Selected>> {
        let of = self.queues[queue].id;
        if state == JobState::Leased {
            return self.leased_in(queue, max).await;
        }
        let most = max as i64;
        let mut ids = if state == JobState::Ready {
            let args = args![of => INT4, most => INT8];
            Self::ids(&self.rows("ready_ids", args).await?)?
        } else {
            let code = state_code(state) as i16;
            let args = args![of => INT4, code => INT2, most => INT8];
            Self::ids(&self.rows("aside_ids", args).await?)?
        };
        if state == JobState::Ready {
            let left = most - ids.len() as i64;
            let args = args![of => INT4, left => INT8];
            ids.extend(Self::ids(&self.rows("parked_ids", args).await?)?);
        }
        Ok(ids.into_iter().map(|id| (id, None)).collect())
    }

    async fn leased_in(&mut self, queue: usize, max: usize) -> Done<Vec<Selected>> {
        let of = Some(self.queues[queue].id);
        let mut found = Vec::new();
        for grant in self.grants_of(None, None, of).await? {
            let Some(held) = self.held(grant) else {
                continue;
            };
            let leases = held.living().filter_map(|at| {
                let id = JobId::from_bytes(held.head(at)?.id);
                Some((id, Some(Place::Leased { grant, at })))
            });
            let leases: Vec<Selected> = leases.take(max - found.len()).collect();
            found.extend(leases);
            if found.len() == max {
                break;
            }
        }
        Ok(found)
    }

    /// The live grants of an owner, a task or a queue, by token.
    async fn grants_of(
        &mut self,
        owner: Option<&str>,
        task: Option<&str>,
        queue: Option<i32>,
    ) -> Done<Vec<GrantKey>> {
        let args = args![self.base.namespace => TEXT, owner => TEXT, task => TEXT, queue => INT4];
        let rows = self.rows("grants_of", args).await?;
        let mut keys = Vec::with_capacity(rows.len());
        for row in rows {
            let name = QueueName::new(row.try_get::<_, String>(0)?)
                .map_err(|_| corrupt("a queue's name is not a name"))?;
            let id: i64 = row.try_get(1)?;
            if let Some(queue) = self.known(&name) {
                keys.push((queue, FencingToken::new(id as u64)));
            }
        }
        self.fetch(&keys).await?;
        keys.retain(|key| self.grants.get(key).is_some_and(|held| held.live > 0));
        Ok(keys)
    }

    async fn each(&mut self, jobs: &Select, act: Act) -> Done<Controlled> {
        let mut answer = Controlled::default();
        for (id, known) in self.selected(jobs).await? {
            // A job that waits may have been moved by the one before it.
            let place = match known {
                Some(place @ Place::Leased { .. }) => Some(place),
                _ => self.find(id).await?,
            };
            let done = match (place, act) {
                (None, _) => false,
                (Some(place), Act::Cancel) => self.cancel(place).await?,
                (Some(place), Act::Purge) => self.purge(place).await?,
                (Some(place), Act::Reschedule(at)) => self.reschedule(place, at).await?,
                (Some(place), Act::RetryDead) => match self.retry_dead(id, place).await? {
                    Retried::Done => true,
                    Retried::Skipped => false,
                    Retried::Duplicate(holder) => {
                        answer.duplicates.push((id, holder));
                        continue;
                    }
                },
            };
            self.flush().await?;
            answer.done += u64::from(done);
            answer.skipped += u64::from(!done);
        }
        Ok(answer)
    }

    async fn cancel(&mut self, place: Place) -> Done<bool> {
        match place {
            Place::Leased { grant, at } => {
                if self.held(grant).is_none_or(|held| held.cancel(at)) {
                    return Ok(false);
                }
                self.note(grant, at, |note| note.cancel = true);
                Ok(true)
            }
            place if is_settled(&place) => Ok(false),
            place => {
                let Some((queue, job)) = self.take(&place).await? else {
                    return Ok(false);
                };
                if let Next::Settled { state, keep_until } =
                    ends::settled(&job, JobState::Cancelled, self.now)
                {
                    self.put_settled(queue, &job, state, keep_until);
                }
                Ok(true)
            }
        }
    }

    async fn purge(&mut self, place: Place) -> Done<bool> {
        if matches!(place, Place::Leased { .. }) {
            return Ok(false);
        }
        let Some((queue, job)) = self.take(&place).await? else {
            return Ok(false);
        };
        self.free_unique(queue, &job);
        self.free_exclusive(queue, &job);
        self.count(queue, Count::Purged, 1);
        Ok(true)
    }

    async fn reschedule(&mut self, place: Place, run_at: Timestamp) -> Done<bool> {
        if is_settled(&place) || matches!(place, Place::Leased { .. }) {
            return Ok(false);
        }
        let Some((queue, mut job)) = self.take(&place).await? else {
            return Ok(false);
        };
        self.free_exclusive(queue, &job);
        // Its key has gone to the next before it joins again.
        self.flush().await?;
        job.run_at = run_at;
        if run_at <= self.now {
            self.join(vec![(queue, job)]).await?;
        } else {
            self.put_scheduled(queue, &job);
        }
        Ok(true)
    }

    async fn retry_dead(&mut self, id: JobId, place: Place) -> Done<Retried> {
        let Place::Aside { queue, state, .. } = place else {
            return Ok(Retried::Skipped);
        };
        if state != state_code(JobState::Dead) {
            return Ok(Retried::Skipped);
        }
        let Some(job) = self.read(&place)? else {
            return Ok(Retried::Skipped);
        };
        if let Some(unique) = job.unique.clone() {
            let key = unique.key.as_str().as_bytes().to_vec();
            let holders = self.take_uniques(&[(0, queue, job)]).await?;
            let of = self.queues[queue].id;
            match holders.get(&(of, key.clone())) {
                Some(holder) if *holder != id => return Ok(Retried::Duplicate(*holder)),
                _ => {
                    let until = unique.window.map(|window| time(self.now.after(window)));
                    let args = args![of => INT4, key => BYTEA, uuid(id) => UUID, until => INT8];
                    self.run("unique_again", args).await?;
                }
            }
        }
        if let Some((queue, mut job)) = self.take(&place).await? {
            ends::revive(&mut job, self.now);
            self.join(vec![(queue, job)]).await?;
        }
        Ok(Retried::Done)
    }

    async fn revoke(
        &mut self,
        leases: &LeaseSelect,
        reason: &str,
        tokens: &mut Vec<FencingToken>,
    ) -> Done<Controlled> {
        let grants: Vec<(GrantKey, Option<usize>)> = match leases {
            LeaseSelect::Job(id) => {
                let Some(Place::Leased { grant, at }) = self.find(*id).await? else {
                    return Ok(Controlled::default());
                };
                vec![(grant, Some(at))]
            }
            LeaseSelect::Owner(owner) => all(self.grants_of(Some(owner), None, None).await?),
            LeaseSelect::Task(task) => all(self.grants_of(None, Some(task), None).await?),
        };
        let mut done = 0;
        for (grant, only) in grants {
            let Some(held) = self.held(grant) else {
                continue;
            };
            let places: Vec<usize> = match only {
                Some(at) => vec![at],
                None => held.living().collect(),
            };
            for at in places {
                let Some((facts, job)) = self.leased(grant, at)? else {
                    continue;
                };
                done += 1;
                if tokens.len() < AUDIT_TOKENS {
                    tokens.push(facts.token);
                }
                let step = ends::revoke(&job, reason, facts.cancel, self.now);
                if let Some(front) = self.end_lease(grant, &facts, job, step) {
                    self.put_front(grant.0, vec![front]);
                }
            }
        }
        Ok(Controlled {
            done,
            ..Controlled::default()
        })
    }
}

/// What became of a dead job that was to be tried again.
enum Retried {
    Done,
    Skipped,
    Duplicate(JobId),
}

fn all(grants: Vec<GrantKey>) -> Vec<(GrantKey, Option<usize>)> {
    grants.into_iter().map(|grant| (grant, None)).collect()
}

fn is_settled(place: &Place) -> bool {
    matches!(place, Place::Aside { state, .. } if *state >= state_code(JobState::Completed))
}
