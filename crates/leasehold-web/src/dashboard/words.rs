//! Numbers and times as people read them.

use std::time::Duration;

use super::html::{Html, html};
use leasehold::clock::{Clock as _, SystemClock, Timestamp};

/// `1,234,567`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `12 ms`, `1.2 s`, `45 s`, `3 min`, `2.5 h`, `4 d`.
pub(super) fn short(d: Duration) -> String {
    match d.as_secs_f64() {
        0.0 => "0 s".to_owned(),
        s if s < 0.001 => format!("{:.0} µs", s * 1e6),
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 119.5 => format!("{s:.0} s"),
        s if s < 7_170.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

/// A share of one, with as many digits as it deserves: `99.98 %`, `97.1 %`, `12 %`.
pub(super) fn percent(share: f64) -> String {
    let value = share * 100.0;
    // What is not all must not read as all, and what is not nothing not as nothing.
    if share >= 1.0 || share <= 0.0 {
        format!("{value:.0} %")
    } else if !(0.1..=99.9).contains(&value) {
        format!("{:.2} %", value.clamp(0.01, 99.99))
    } else {
        format!("{value:.1} %")
    }
}

/// A rate per second.
pub(super) fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 100.0 => grouped(r.round() as u64),
        r if r >= 0.995 => format!("{r:.1}"),
        r if r > 0.0 => format!("{r:.2}"),
        _ => "0".to_owned(),
    }
}

/// The present, for people: no decision rests on it.
pub(super) fn now() -> Timestamp {
    SystemClock.now()
}

/// How long ago, with the moment itself as the title.
pub(super) fn ago(at: Timestamp, now: Timestamp) -> Html {
    let text = if at > now {
        format!("in {}", short(at.since(now)))
    } else {
        format!("{} ago", short(now.since(at)))
    };
    let moment = moment(at);
    html!(
        r#"<time datetime="{}" title="{}">{}</time>"#,
        moment,
        moment,
        text
    )
}

/// `2026-11-16T05:59:20Z`.
pub(super) fn moment(at: Timestamp) -> String {
    let seconds = at.as_micros() / 1_000_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The calendar day that is so many days after 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // Whole cycles of 400 years first, so that the loop is short whatever the number.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let lengths = [
        31,
        if leap(year) { 29 } else { 28 },
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

/// The text, cut after so many characters.
pub(super) fn clip(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

/// `1 lease`, `2 leases`.
pub(super) fn count(number: u64, one: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{} {one}{s}", grouped(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_calendar_days() {
        let at = |seconds: u64| moment(Timestamp::from_micros(seconds * 1_000_000));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn a_share_never_reads_as_all_or_nothing_unless_it_is() {
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.999_999), "99.99 %");
        assert_eq!(percent(0.971), "97.1 %");
        assert_eq!(percent(0.000_001), "0.01 %");
        assert_eq!(percent(0.0), "0 %");
    }

    #[test]
    fn numbers_and_times_are_short() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(short(Duration::from_millis(1_250)), "1.2 s");
        assert_eq!(short(Duration::from_secs(300)), "5 min");
        assert_eq!(clip("größer", 3), "grö…");
        assert_eq!(count(1, "lease"), "1 lease");
    }
}
