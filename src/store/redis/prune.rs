//! prune: delete settled jobs past their retention, and unique keys past their window.

use std::sync::Arc;

use super::RedisStore;
use super::step::Steps;
use crate::clock::micros;
use crate::error::{Result, Verb};
use crate::limits;
use crate::store::{PruneRequest, bounded};

/// Jobs, and keys, that one step deletes.
const CHUNK: u64 = 100;

impl RedisStore {
    pub(super) async fn prune_all(&self, request: &PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS)?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Prune)?;
        let plan = if let Some(plan) = self.shared.sessions.plan(id) {
            plan
        } else {
            let all = self.all_partitions().await?;
            let plan = Arc::new(all.into_iter().map(|partition| (partition, 0)).collect());
            self.shared.sessions.set_plan(id, &plan);
            plan
        };
        if plan.is_empty() {
            self.nowhere(id).await?;
        }
        let most = request.max as u64;
        let (mut pruned, mut freed) = (0, 0);
        for (partition, _) in plan.iter() {
            if pruned.max(freed) >= most {
                break;
            }
            let overdue = micros(request.overdue).to_string();
            let mut steps = Steps::new(self, partition.keys(), id, Verb::Prune);
            loop {
                let max = (most - pruned.max(freed)).min(CHUNK);
                let shown = max.to_string();
                let args: [&[u8]; 2] = [overdue.as_bytes(), shown.as_bytes()];
                let mut body = steps.take(&self.functions().prune, &args).await?;
                let (jobs, keys) = (body.u64()?, body.u64()?);
                (pruned, freed) = (pruned + jobs, freed + keys);
                if jobs.max(keys) < max || pruned.max(freed) >= most {
                    break;
                }
            }
            steps.end(&self.functions().prune).await?;
        }
        Ok(pruned)
    }
}
