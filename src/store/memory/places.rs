//! Where each job is, by its id.

use std::collections::{BTreeMap, VecDeque};

use super::Place;
use crate::job::JobId;

/// Places by id.
///
/// Ids grow with time: a job comes behind all others, and leaves among the first. A row in the order
/// of ids serves most of them at its ends; the few that come out of order are kept in a tree.
#[derive(Default)]
pub(super) struct Places {
    /// Ids without a place are gaps; the ends are never gaps.
    row: VecDeque<(JobId, Option<Place>)>,
    gaps: usize,
    /// Behind the last one removed: jobs leave as they came, one behind the other.
    next: usize,
    out_of_order: BTreeMap<JobId, Place>,
}

impl Places {
    pub(super) fn get(&self, id: &JobId) -> Option<&Place> {
        let in_row = self.find(id).ok().and_then(|at| self.row[at].1.as_ref());
        in_row.or_else(|| self.out_of_order.get(id))
    }

    pub(super) fn contains(&self, id: &JobId) -> bool {
        self.get(id).is_some()
    }

    /// Notes where a job is, whether or not it was somewhere else before.
    pub(super) fn insert(&mut self, id: JobId, place: Place) {
        if let Some(known) = self.out_of_order.get_mut(&id) {
            *known = place;
            return;
        }
        match self.find(&id) {
            Ok(at) => {
                let before = self.row[at].1.replace(place);
                self.gaps -= usize::from(before.is_none());
            }
            Err(at) if at == self.row.len() => self.row.push_back((id, Some(place))),
            Err(_) => {
                self.out_of_order.insert(id, place);
            }
        }
    }

    pub(super) fn remove(&mut self, id: &JobId) {
        let is_next = self.row.get(self.next).is_some_and(|(next, _)| next == id);
        let found = if is_next {
            Ok(self.next)
        } else {
            self.find(id)
        };
        let Some(at) = found.ok().filter(|at| self.row[*at].1.take().is_some()) else {
            self.out_of_order.remove(id);
            return;
        };
        self.next = at + 1;
        self.gaps += 1;
        while let Some((_, None)) = self.row.front() {
            self.row.pop_front();
            self.gaps -= 1;
            self.next = self.next.saturating_sub(1);
        }
        while let Some((_, None)) = self.row.back() {
            self.row.pop_back();
            self.gaps -= 1;
        }
        // One old job must not keep a gap for each that came and went since.
        if self.gaps > self.row.len() / 2 {
            self.row.retain(|(_, place)| place.is_some());
            self.gaps = 0;
        }
    }

    /// Where the id is in the row, or would be.
    fn find(&self, id: &JobId) -> Result<usize, usize> {
        if self.row.back().is_none_or(|(last, _)| last < id) {
            return Err(self.row.len());
        }
        self.row.binary_search_by(|(other, _)| other.cmp(id))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lease::FencingToken;

    fn id(n: u8) -> JobId {
        JobId::from_bytes([n; 16])
    }

    fn place(n: u64) -> Place {
        let token = FencingToken::new(n);
        Place::Leased {
            grant: token,
            token,
        }
    }

    fn number(place: &Place) -> u64 {
        match place {
            Place::Leased { token, .. } => token.get(),
            _ => unreachable!(),
        }
    }

    proptest! {
        #[test]
        fn it_is_a_map(steps in proptest::collection::vec((any::<bool>(), any::<u8>()), 0..400)) {
            let (mut places, mut model) = (Places::default(), BTreeMap::new());
            for (step, (insert, n)) in steps.into_iter().enumerate() {
                if insert {
                    places.insert(id(n), place(step as u64));
                    model.insert(n, step as u64);
                } else {
                    places.remove(&id(n));
                    model.remove(&n);
                }
                // Itself and its neighbours; all of them would take minutes.
                for n in n.saturating_sub(1)..=n.saturating_add(1) {
                    prop_assert_eq!(places.get(&id(n)).map(number), model.get(&n).copied());
                }
                let gaps = places.row.iter().filter(|(_, place)| place.is_none()).count();
                prop_assert_eq!(places.gaps, gaps);
                prop_assert!(gaps <= places.row.len() / 2);
            }
            for n in 0..=u8::MAX {
                prop_assert_eq!(places.get(&id(n)).map(number), model.get(&n).copied());
            }
        }
    }

    #[test]
    fn one_old_job_keeps_no_room_for_those_that_came_and_went() {
        let mut places = Places::default();
        let ids = |n: u64| JobId::from_bytes(u128::from(n).to_be_bytes());
        places.insert(ids(0), place(0));
        for n in 1..100_000 {
            places.insert(ids(n), place(n));
            if n > 10 {
                places.remove(&ids(n - 10));
            }
        }
        assert!(places.row.len() < 100, "{}", places.row.len());
        assert!(places.contains(&ids(0)) && places.contains(&ids(99_999)));
        assert!(places.out_of_order.is_empty());
    }
}
