//! One issuer and several processes: what one of them was given, the next knows from the issuer
//! alone.

use std::time::Duration;

use leasehold::clock::{Clock, ManualClock};
use leasehold::store::Outcome;
use leasehold::{ErrorKind, FencingToken};
use leasehold_conformance::{Driver, Held};

/// How far tokens may run ahead of the clock, in microseconds.
const LEAD: u64 = 20_000;

/// Each process that `process` starts goes on behind the last token, within what fits. If `twice`
/// is set, claims name their queue twice, and then they are not plain.
pub async fn goes_on_behind_the_last(
    clock: &ManualClock,
    twice: bool,
    process: impl AsyncFn() -> Driver,
) {
    let now = || clock.now().as_micros();
    let claim = async |max: usize| {
        let d = process().await;
        let mut request = d.claim_request(max);
        if twice {
            request.queues.push(request.queues[0].clone());
        }
        let claimed = d.store().claim(request).await;
        claimed.map(|claimed| Held::all(&claimed))
    };
    let tokens = |held: &[Held]| -> Vec<u64> { held.iter().map(|h| h.token().get()).collect() };
    process().await.enqueue_many(40).await;

    // One that has forgotten everything may have given as much as fits.
    let mut last = tokens(&claim(1).await.unwrap())[0];
    assert!(last > now() + LEAD, "{last} at {}", now());
    for count in [3, 1, 2] {
        let given = tokens(&claim(count).await.unwrap());
        assert_eq!(given, (last + 1..=last + count as u64).collect::<Vec<_>>());
        last += count as u64;
    }

    // The clock leads again once it has caught up.
    clock.advance(Duration::from_secs(9));
    assert_eq!(tokens(&claim(2).await.unwrap()), [now(), now() + 1]);
    last = now() + 1;

    // And falls behind: four tokens fit, then none, then one for each microsecond.
    clock.set(clock.now().before(Duration::from_micros(LEAD - 5)));
    let given = tokens(&claim(9).await.unwrap());
    assert_eq!(given, (last + 1..=last + 4).collect::<Vec<_>>());
    last += 4;
    let refused = claim(9).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::TokensAhead, "{refused}");
    clock.advance(Duration::from_micros(1));
    let held = claim(9).await.unwrap();
    assert_eq!(tokens(&held), [last + 1]);

    // The mark of a fence is followed by all.
    let mark = last + 3_600_000_000;
    let outcome = Outcome::Surrender {
        delay: Duration::ZERO,
        mark: Some(FencingToken::new(mark)),
    };
    process().await.settled(&held[0], outcome).await;
    for next in [mark + 1, mark + 2] {
        assert_eq!(tokens(&claim(1).await.unwrap()), [next]);
    }
}
