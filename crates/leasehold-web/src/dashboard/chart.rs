//! Pictures: SVG made here, coloured by the style sheet, with no inline style.

use super::html::{Html, html, put};
use super::watch::{Point, Stretch};
use super::words::{count, grouped};

/// About the pixels that a chart has on a desk, so that the figures of its axes are as large as
/// text.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 170.0;
/// Room for the figures of the axis.
const LEFT: f64 = 46.0;
const BOTTOM: f64 = 24.0;
/// Failures and expiries are rare, and what the chart is looked at for.
const RARE: f64 = 4.0;

/// A bar split by shares; the words say the same.
pub(super) fn split(parts: &[(&str, u64)], words: &str) -> Html {
    let sum: u64 = parts.iter().map(|(_, count)| count).sum();
    let mut html = html!(
        r#"<svg class="split" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="{}">"#,
        words
    );
    put!(html, r#"<rect class="f-none" width="1000" height="10"/>"#);
    let mut x = 0.0;
    for ((class, _), width) in parts.iter().zip(widths(parts, sum)) {
        if width > 0.0 {
            put!(
                html,
                r#"<rect class="f-{}" x="{}" width="{}" height="10"/>"#,
                *class,
                round(x),
                round(width)
            );
        }
        x += width;
    }
    put!(html, "</svg>");
    html
}

/// Of a bar of 1,000, how much each part has. What happened at all can be seen, on a phone too: the
/// largest part makes room for it.
fn widths(parts: &[(&str, u64)], sum: u64) -> Vec<f64> {
    const LEAST: f64 = 10.0;
    let width = |count: u64| match count {
        0 => 0.0,
        count => (1_000.0 * count as f64 / sum as f64).max(LEAST),
    };
    let mut widths: Vec<f64> = parts.iter().map(|(_, count)| width(*count)).collect();
    let excess = widths.iter().sum::<f64>() - 1_000.0;
    if let Some(largest) = widths.iter_mut().max_by(|a, b| a.total_cmp(b)) {
        *largest -= excess.max(0.0);
    }
    widths
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// A round number that is not less, for the top of an axis; so is its half, and from 10 on a whole
/// one.
fn top(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let magnitude = 10_f64.powf(most.log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    let step = steps
        .into_iter()
        .find(|step| step * magnitude >= most * 0.999);
    step.unwrap_or(10.0) * magnitude
}

/// The same for things that are counted: its half is a whole number.
fn whole_top(most: u64) -> f64 {
    match most {
        0..=2 => 2.0,
        3..=9 => most.next_multiple_of(2) as f64,
        _ => top(most as f64),
    }
}

/// A figure of an axis that ends at `most`: no digits that say nothing.
fn figure(value: f64, most: f64) -> String {
    if most >= 10.0 {
        return grouped(value.round() as u64);
    }
    let digits = if most < 1.0 { 2 } else { 1 };
    let text = format!("{value:.digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn frame(html: &mut Html, most: f64, from: &str) {
    for share in [0.0, 0.5, 1.0] {
        let y = round((HEIGHT - BOTTOM) * (1.0 - share) + 8.0 * share);
        put!(
            html,
            r#"<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="tick" x="{}" y="{}" text-anchor="end">{}</text>"#,
            LEFT,
            WIDTH,
            y,
            y,
            LEFT - 8.0,
            y + 4.0,
            figure(most * share, most)
        );
    }
    put!(
        html,
        r#"<text class="tick" x="{}" y="{}">{}</text><text class="tick" x="{}" y="{}" text-anchor="end">now</text>"#,
        LEFT,
        HEIGHT - 4.0,
        from,
        WIDTH,
        HEIGHT - 4.0
    );
}

/// Ended leases per column of time, on top of each other by how they ended.
pub(super) fn ends(columns: &[Stretch], from: &str) -> Html {
    let sum = |column: &Stretch| column.ends().iter().map(|(_, count)| count).sum();
    let most = whole_top(columns.iter().map(sum).max().unwrap_or_default());
    let mut html = open(&format!("{} in this time", told(columns)));
    frame(&mut html, most, from);
    let room = HEIGHT - BOTTOM - 8.0;
    let width = (WIDTH - LEFT) / columns.len() as f64;
    for (at, column) in columns.iter().enumerate() {
        let x = LEFT + width * at as f64;
        let mut y = HEIGHT - BOTTOM;
        put!(html, "<g><title>{}</title>", told(&[*column]));
        for (class, count) in column.ends() {
            if count == 0 {
                continue;
            }
            let least = if class == "released" { 1.5 } else { RARE };
            let height = (room * count as f64 / most).max(least);
            y -= height;
            put!(
                html,
                r#"<rect class="f-{}" x="{}" y="{}" width="{}" height="{}" rx="1"/>"#,
                class,
                round(x + 0.75),
                round(y),
                round((width - 1.5).max(0.5)),
                round(height)
            );
        }
        put!(html, "</g>");
    }
    put!(html, "</svg>");
    html
}

/// How the leases of all columns ended, in words.
fn told(columns: &[Stretch]) -> String {
    let sum = |of: fn(&Stretch) -> u64| grouped(columns.iter().map(of).sum());
    format!(
        "{} done or handed back, {} retried, {} buried, {} expired, {} revoked",
        sum(Stretch::well),
        sum(|column| column.retried),
        sum(|column| column.buried),
        sum(|column| column.expired),
        sum(|column| column.revoked)
    )
}

fn open(words: &str) -> Html {
    html!(
        r#"<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">"#,
        WIDTH,
        HEIGHT,
        words
    )
}

/// Jobs stored and jobs completed per second, as lines.
pub(super) fn flow(columns: &[Stretch], from: &str) -> Html {
    let stored: Vec<f64> = columns.iter().map(|c| c.rate(c.enqueued)).collect();
    let done: Vec<f64> = columns.iter().map(|c| c.rate(c.completed)).collect();
    let most = top(stored.iter().chain(&done).copied().fold(0.0, f64::max));
    let mut html = open("jobs stored and completed per second");
    frame(&mut html, most, from);
    let known = columns
        .iter()
        .position(|column| column.seconds > 0.0)
        .unwrap_or(0);
    for (class, values) in [("stored", &stored), ("done", &done)] {
        let points = line(&values[known..], columns.len() - known, columns.len(), most);
        put!(
            html,
            r#"<polyline class="l-{}" points="{}"/>"#,
            class,
            points
        );
    }
    put!(html, "</svg>");
    html
}

/// The points of a line that ends at the right edge.
fn line(values: &[f64], shown: usize, of: usize, most: f64) -> String {
    let width = (WIDTH - LEFT) / of as f64;
    let skipped = of - shown;
    let room = HEIGHT - BOTTOM - 8.0;
    let points = values.iter().enumerate().map(|(at, value)| {
        let x = LEFT + width * ((skipped + at) as f64 + 0.5);
        let y = HEIGHT - BOTTOM - room * value / most;
        format!("{},{}", round(x), round(y))
    });
    points.collect::<Vec<_>>().join(" ")
}

/// A queue's last minutes in a table's cell: leases ended between samples.
pub(super) fn spark(points: &[Point]) -> Html {
    const COLUMNS: usize = 40;
    let steps = points.len().saturating_sub(1);
    let per = steps.div_ceil(COLUMNS).max(1);
    let columns: Vec<Stretch> = (0..steps)
        .step_by(per)
        .map(|at| Stretch::between(&points[at], &points[(at + per).min(steps)]))
        .collect();
    let sum = |column: &Stretch| -> u64 { column.ends().iter().map(|(_, count)| count).sum() };
    let most = columns.iter().map(sum).max().unwrap_or(0).max(1) as f64;
    let mut html = html!(
        r#"<svg class="spark" viewBox="0 0 120 24" preserveAspectRatio="none" role="img" aria-label="{} over the last minutes">"#,
        told(&columns)
    );
    let width = 120.0 / COLUMNS as f64;
    let skipped = COLUMNS - columns.len().min(COLUMNS);
    for (at, column) in columns.iter().enumerate() {
        let x = round((skipped + at) as f64 * width);
        let mut y = 24.0;
        for (class, count) in column.ends() {
            if count == 0 {
                continue;
            }
            let height = (23.0 * count as f64 / most).max(1.5);
            y -= height;
            put!(
                html,
                r#"<rect class="f-{}" x="{}" y="{}" width="{}" height="{}"/>"#,
                class,
                x,
                round(y),
                round(width - 0.6),
                round(height)
            );
        }
    }
    put!(html, "</svg>");
    html
}

/// Counts by label, as lying bars with their figures.
pub(super) fn histogram(class: &str, rows: &[(String, u64)], unit: &str) -> Html {
    let most = rows
        .iter()
        .map(|(_, count)| *count)
        .max()
        .unwrap_or(0)
        .max(1);
    let mut html = html!(r#"<table class="histogram"><tbody>"#);
    for (label, number) in rows {
        let width = round(200.0 * *number as f64 / most as f64);
        put!(
            html,
            r#"<tr><th scope="row">{}</th><td><svg viewBox="0 0 200 10" preserveAspectRatio="none" aria-hidden="true"><rect class="f-none" width="200" height="10"/><rect class="f-{}" width="{}" height="10"/></svg></td><td class="num" title="{}">{}</td></tr>"#,
            label,
            class,
            if *number > 0 { width.max(2.0) } else { 0.0 },
            count(*number, unit),
            grouped(*number)
        );
    }
    put!(html, "</tbody></table>");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_ends_at_a_round_number() {
        for (most, expected) in [
            (0.0, 1.0),
            (0.7, 0.8),
            (3.0, 3.0),
            (10.0, 10.0),
            (61.0, 80.0),
            (130.0, 160.0),
            (2_300.0, 3_000.0),
        ] {
            assert!((top(most) - expected).abs() < 1e-9, "{most} {}", top(most));
        }
        for (most, expected) in [(0, 2.0), (3, 4.0), (9, 10.0), (10, 10.0), (61, 80.0)] {
            assert!((whole_top(most) - expected).abs() < 1e-9, "{most}");
        }
        let figures = [(50.0, 100.0), (1.5, 3.0), (0.0, 3.0), (0.25, 0.5)];
        let figures = figures.map(|(value, most)| figure(value, most));
        assert_eq!(figures, ["50", "1.5", "0", "0.25"]);
    }

    #[test]
    fn a_failure_has_a_colour_of_its_own() {
        let (from, mut to) = (Point::default(), Point::default());
        (to.retried, to.buried, to.completed) = (300, 60, 0);
        let failing = [Stretch::between(&from, &to)];
        for picture in [ends(&failing, "1 min ago"), spark(&[from, to])] {
            let picture = picture.into_string();
            assert!(picture.contains("0 done or handed back, 300 retried, 60 buried"));
            assert!(picture.contains("f-retried") && picture.contains("f-buried"));
            assert!(!picture.contains("f-released"), "{picture}");
        }
    }

    #[test]
    fn what_happened_can_be_seen() {
        let bar = split(&[("released", 1_000_000), ("expired", 1)], "words").into_string();
        assert!(
            bar.contains(r#"<rect class="f-expired" x="990" width="10""#),
            "{bar}"
        );
        assert!(
            !split(&[("released", 0)], "")
                .into_string()
                .contains("f-released")
        );
    }
}
