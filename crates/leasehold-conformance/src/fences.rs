//! How the checker judges fenced resources: I2, I3.

use std::collections::HashMap;

use super::checker::{Rule, Violation};
use super::history::{Answer, Event, Final, Op, What};
use leasehold::lease::FencingToken;

pub(super) fn check(events: &[Event], last: Option<&Final>, found: &mut Vec<Violation>) {
    let ops = events.iter().filter_map(|event| match &event.what {
        What::Invoke(op @ (Op::FenceOpen { .. } | Op::FenceWrite { .. })) => Some((event.call, op)),
        _ => None,
    });
    let ops: HashMap<u64, &Op> = ops.collect();
    // The largest token that a resource was open for, and the event that shows it.
    let mut marks: HashMap<&str, (FencingToken, u64)> = HashMap::new();
    // The same at the time when a call was sent: only that binds it.
    let mut marks_when_sent: HashMap<u64, (FencingToken, u64)> = HashMap::new();
    for event in events {
        let Some(op) = ops.get(&event.call) else {
            continue;
        };
        let (resource, token, value) = match op {
            Op::FenceOpen { resource, token } => (resource, *token, None),
            Op::FenceWrite {
                resource,
                token,
                value,
            } => (resource, *token, Some(value)),
            _ => continue,
        };
        match &event.what {
            What::Invoke(_) => {
                if let Some(mark) = marks.get(resource.as_str()) {
                    marks_when_sent.insert(event.call, *mark);
                }
            }
            What::Ok(Answer::Fence { accepted: true }) => {
                let mark = marks_when_sent.get(&event.call);
                if let Some((mark, shown)) = mark.filter(|(mark, _)| token < *mark) {
                    let detail = format!("{resource} was open for {mark}");
                    let events = vec![*shown, event.call, event.at];
                    let violation = Violation::new(Rule::StaleTokenAccepted, events, detail);
                    found.push(violation.token(token));
                }
                let mark = marks.entry(resource).or_insert((token, event.at));
                if token > mark.0 {
                    *mark = (token, event.at);
                }
                let kept = last.map(|last| last.resources.get(resource));
                if let (Some(value), Some(kept)) = (value, kept)
                    && kept.is_none_or(|kept| !kept.contains(value))
                {
                    let detail = format!("{value} is not in {resource}");
                    let events = vec![event.call, event.at];
                    found.push(Violation::new(Rule::WriteLost, events, detail).token(token));
                }
            }
            _ => {}
        }
    }
}
