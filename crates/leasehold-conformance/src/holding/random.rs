//! Random programs of many waiters, holders and operators, judged by the [checker](super::checker).

use super::driver::{
    HoldingDriver, ask, ask_all, by, family, name, path, range, secs, shared, units,
};
use leasehold::lease::Nonce;
use leasehold::rules::holding::Scope;
use leasehold::store::holding::{Acquired, Ask, GrantedHolding, HoldingCommand, HoldingSelect};

/// How many calls a program makes.
const STEPS: usize = 400;

/// Names, shared and exclusive, with and without waiting.
pub async fn names(d: &HoldingDriver) {
    program(d, 1, |dice| name(["a", "b"][dice.usize(..2)])).await;
}

/// Paths, of which some are above others.
pub async fn paths(d: &HoldingDriver) {
    let texts = ["/", "/a", "/a/b", "/a/c", "/d"];
    program(d, 2, |dice| path(texts[dice.usize(..5)])).await;
}

/// Ranges of one resource.
pub async fn ranges(d: &HoldingDriver) {
    program(d, 3, |dice| {
        let start = dice.u64(..8);
        range(start, start + dice.u64(1..4))
    })
    .await;
}

/// One program. It asks, waits, renews, saves, releases, forgets what it holds, and revokes.
pub async fn program(d: &HoldingDriver, seed: u64, scope: impl Fn(&mut fastrand::Rng) -> Scope) {
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut held: Vec<GrantedHolding> = Vec::new();
    let mut line: Vec<Ask> = Vec::new();
    d.configure(Some(3), None).await;
    for step in 0..STEPS {
        match dice.u8(..14) {
            0..=3 => {
                let ask = new_ask(&mut dice, &scope, step);
                keep(d.acquire(&ask).await, ask, &mut held, &mut line);
            }
            4..=7 if !line.is_empty() => {
                let mut ask = line.swap_remove(dice.usize(..line.len()));
                ask.wait &= dice.u8(..8) > 0;
                keep(d.acquire(&ask).await, ask, &mut held, &mut line);
            }
            8 | 9 if !held.is_empty() => {
                let holding = held.swap_remove(dice.usize(..held.len()));
                if holding.receipt.nonce.as_bytes()[0] == 2 && dice.bool() {
                    let _ = d.commit(&holding).await;
                } else {
                    d.release(&holding).await;
                }
            }
            10 if !held.is_empty() => {
                let _ = d.renew(&held[dice.usize(..held.len())]).await;
            }
            11 if !held.is_empty() => {
                let holding = &held[dice.usize(..held.len())];
                let _ = d.save(holding, dice.u64(..4), "state").await;
            }
            12 => {
                d.advance(secs(dice.u64(..4))).await;
                if dice.u8(..9) == 0 {
                    d.advance(secs(60)).await;
                }
            }
            13 => match dice.u8(..6) {
                0 => {
                    let owner = format!("w{}", dice.u8(..4));
                    let select = HoldingSelect::Owner(owner.into());
                    d.control(HoldingCommand::Revoke(select)).await;
                }
                1 => {
                    let restock = HoldingCommand::Restock {
                        family: family(),
                        scope: name("u"),
                        units: 2,
                    };
                    d.control(restock).await;
                }
                2 if !line.is_empty() => {
                    let ask = line.swap_remove(dice.usize(..line.len()));
                    d.withdraw(&ask).await;
                }
                _ => {
                    d.reap().await;
                }
            },
            _ => {}
        }
    }
}

fn new_ask(
    dice: &mut fastrand::Rng,
    scope: &impl Fn(&mut fastrand::Rng) -> Scope,
    step: usize,
) -> Ask {
    let mut new = match dice.u8(..8) {
        0 => units("u", dice.u32(1..4)),
        1 => {
            let scopes = vec![scope(dice), name("z")];
            ask_all(scopes)
        }
        2..=4 => shared(scope(dice)),
        _ => ask(scope(dice)),
    };
    // Its own randomness would make each run another program.
    let mut nonce = [0; 16];
    nonce[0] = if new.mode.units() > 0 { 2 } else { 1 };
    nonce[8..].copy_from_slice(&(step as u64).to_be_bytes());
    new.nonce = Nonce::from_bytes(nonce);
    new.wait = dice.u8(..3) > 0;
    by(&format!("w{}", dice.u8(..4)), new)
}

fn keep(answer: Acquired, ask: Ask, held: &mut Vec<GrantedHolding>, line: &mut Vec<Ask>) {
    match answer {
        Acquired::Granted(holding) => held.push(holding),
        Acquired::Busy(_) if ask.wait => line.push(ask),
        Acquired::Busy(_) | Acquired::Refused(_) | Acquired::Ended => {}
    }
}
