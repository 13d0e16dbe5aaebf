//! What must hold for any bytes. The fuzz targets call these, and so does
//! `tests/stores/property.rs` with bytes of its own, where no fuzzer is at hand.

pub mod http;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use leasehold::lease::Receipt;
use leasehold::{Client, ErrorKind};

/// A text is a receipt's own, or refused with the field's name; never both, never a panic.
pub fn receipt(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match text.parse::<Receipt>() {
        Ok(receipt) => {
            assert_eq!(receipt.to_string(), text, "two texts for one receipt");
            let (rest, proof) = text.rsplit_once('/').unwrap_or_default();
            // A queue may be called what the proof is: then it is the name that shows.
            let shows = format!("{receipt:?}").contains(proof);
            assert!(!shows || rest.contains(proof), "the proof shows");
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.field().is_some());
        }
    }
}

/// A record is read whole, and written again as it was; or it is corrupt.
pub fn record(data: &[u8]) {
    match leasehold::hooks::reread(data) {
        Ok(again) => {
            // What is read is what is written: nothing in the record went unread.
            let twice = leasehold::hooks::reread(&again);
            assert_eq!(twice.expect("its own record"), again);
            assert_eq!(again.len(), data.len());
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
    }
}

/// An answer of a Redis script is read to its end, or refused: as corrupt, or as what it says.
pub fn answer(data: &[u8]) {
    let Some((form, answer)) = data.split_first() else {
        return;
    };
    if let Err(error) = leasehold::hooks::read_answer(*form, answer) {
        let says = [
            ErrorKind::SessionLost,
            ErrorKind::TokensAhead,
            ErrorKind::InvalidInput,
            // The layout of another version.
            ErrorKind::Unsupported,
        ];
        let kind = error.kind();
        assert!(
            kind == ErrorKind::Corrupt || says.contains(&kind),
            "{error}"
        );
    }
}

/// A URL opens memory, or is refused (a server needs a runtime), without its words being repeated.
pub fn url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    // Those would make files, or connect.
    if text.starts_with("sqlite:") || text.starts_with("postgres") {
        return;
    }
    open(text);
    open(&format!("memory:?{text}"));
}

fn open(url: &str) {
    let opened = pin!(Client::open(url)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(opened) = opened else {
        panic!("memory waits for nothing");
    };
    let Err(error) = opened else {
        assert!(url.starts_with("memory:"));
        return;
    };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let told = format!("{error} {error:?}");
    assert!(told.len() < 1_000, "{} bytes about a URL", told.len());
    // Whatever stands before an `@` may be a password.
    if let Some((secrets, _)) = url.rsplit_once('@') {
        let secret = secrets.rsplit([':', '/', '=', '&', '?']).next();
        let secret = secret.filter(|secret| secret.len() > 12);
        assert!(!secret.is_some_and(|secret| told.contains(secret)));
    }
}
