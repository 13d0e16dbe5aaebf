//! Printing: tables, colours, durations, and the one line of trouble.

use std::io::{self, Write as _};
use std::time::Duration;

use leasehold::clock::Timestamp;

/// Prints data.
///
/// # Errors
/// If nobody reads it.
pub(super) fn data(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        stdout.write_all(b"\n")?;
    }
    stdout.flush()
}

/// Says something that is not data. If nobody listens, so be it.
pub(super) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "leasehold: {text}");
}

/// The text without line breaks and control characters.
pub(super) fn one_line(text: &str) -> String {
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c.is_control())
        .collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// The text without what may be a secret: whatever stands before the host of a URL, and the values
/// of settings that sound like one.
pub(super) fn without_secrets(text: &str) -> String {
    let words = text.split(' ').map(|word| {
        let mut word = word.to_owned();
        if let Some(start) = word.find("://").map(|at| at + 3)
            && let Some(host) = word[start..].rfind('@')
        {
            word.replace_range(start..start + host, "***");
        }
        for name in ["password=", "pass=", "secret=", "token="] {
            if let Some(start) = word.find(name).map(|at| at + name.len()) {
                let end = word[start..].find(['&', '\'', '"']);
                let end = end.map_or(word.len(), |end| start + end);
                word.replace_range(start..end, "***");
            }
        }
        word
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The text in at most so many characters.
pub(super) fn clip(text: &str, most: usize) -> String {
    let mut chars = text.chars();
    let mut clipped: String = chars.by_ref().take(most).collect();
    if chars.next().is_some() {
        clipped.push('…');
    }
    clipped
}

/// A moment for people, in UTC: `2026-11-16 06:16:06`.
pub(super) fn time(at: Timestamp) -> String {
    precise(at)[..19].replace('T', " ")
}

/// A moment for programs: RFC 3339, in UTC, to the microsecond.
pub(super) fn precise(at: Timestamp) -> String {
    let (seconds, micros) = (at.as_micros() / 1_000_000, at.as_micros() % 1_000_000);
    let (mut days, second) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    loop {
        let length = 365 + u64::from(leap(year));
        if days < length || year == 9999 {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let day = days.min(30) + 1;
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Colours, if anybody wants them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint(bool);

impl Paint {
    /// For a stream that is a terminal or not.
    pub(super) fn new(terminal: bool) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self(terminal && !refused && !dumb)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    pub(super) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    pub(super) fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.wrap("31", text)
    }

    pub(super) fn cold(self, text: &str) -> String {
        self.wrap("36", text)
    }
}

/// Rows under a header: columns of figures to the right, the others to the left.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let figures: Vec<bool> = (0..header.len())
        .map(|column| column > 0 && rows.iter().all(|row| is_figure(row.get(column))))
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, &width))| {
            if figures[column] {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut header.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

fn is_figure(cell: Option<&String>) -> bool {
    cell.is_none_or(|cell| cell == "-" || cell.starts_with(|c: char| c.is_ascii_digit()))
}

/// `1.25 s`, `12 ms`, `3 min`: short enough for a column.
pub(super) fn short(d: Duration) -> String {
    match d.as_secs_f64() {
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.95 => format!("{s:.2} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

/// A share of one: `0 %`, `0.01 %`, `12.3 %`, `100 %`. What is not all does not read as all, and
/// what is not nothing not as nothing.
pub(super) fn percent(share: f64) -> String {
    match share * 100.0 {
        all if all <= 0.0 || all >= 100.0 => format!("{all:.0} %"),
        some if !(0.1..=99.9).contains(&some) => format!("{:.2} %", some.clamp(0.01, 99.99)),
        some => format!("{some:.1} %"),
    }
}

/// A whole number with thousands apart: `1,234,567`.
pub(super) fn grouped(number: f64) -> String {
    let digits = format!("{:.0}", number.abs());
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A duration as people write it: `250ms`, `5s`, `1.5m`, `2h`, `7d`; a bare number is seconds.
///
/// # Errors
/// If it is none.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let unit = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, unit) = text.split_at(unit.unwrap_or(text.len()));
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err("units are ms, s, m, h, d".to_owned()),
    };
    let number: f64 = number
        .trim()
        .parse()
        .map_err(|_| "a number and a unit, like 5s")?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| "out of range".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("5"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for wrong in ["", "s", "-5s", "5 fortnights", "1e400s", "nan"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(0.4), "0");
        assert_eq!(grouped(999.0), "999");
        assert_eq!(grouped(1_234_567.0), "1,234,567");
    }

    #[test]
    fn figures_stand_to_the_right_and_words_to_the_left() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let rows = [row(["a", "1", "no"]), row(["bb", "-", "7 it is"])];
        assert_eq!(
            table(&["queue", "jobs", "why"], &rows),
            "queue  jobs  why\na         1  no\nbb        -  7 it is\n"
        );
    }

    #[test]
    fn moments_are_read_by_people_and_programs() {
        let at = |seconds: u64| precise(Timestamp::from_micros(seconds * 1_000_000));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59.000000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000000Z");
        assert_eq!(
            time(Timestamp::from_micros(1_500_000)),
            "1970-01-01 00:00:01"
        );
        assert!(precise(Timestamp::from_micros(u64::MAX)).starts_with("9999-12-31T"));
    }

    #[test]
    fn secrets_are_not_shown() {
        for (text, shown) in [
            (
                "at redis://u:p@ss@host:1/2: refused",
                "at redis://***@host:1/2: refused",
            ),
            (
                "'postgres://u@h?password=x&a=b'",
                "'postgres://***@h?password=***&a=b'",
            ),
            ("sqlite://jobs.db is busy", "sqlite://jobs.db is busy"),
        ] {
            assert_eq!(without_secrets(text), shown);
        }
    }

    #[test]
    fn trouble_is_one_line() {
        assert_eq!(one_line("a\n  b\x1b[31m\tc\r\n"), "a b [31m c");
    }
}
