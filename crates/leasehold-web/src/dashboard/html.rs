//! HTML in which everything is escaped except for the literals in this crate's source.
//!
//! [`put!`] takes a literal and values; each value is a [`Part`], and only [`Html`] itself goes in
//! as it is. The literal cannot capture variables, so no value can get around this.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use leasehold::job::{JobId, JobState, Kind, QueueName};
use leasehold::lease::FencingToken;

/// Text that is HTML already.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Html(String);

impl Html {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }

    pub(super) fn put(&mut self, text: fmt::Arguments<'_>) {
        // A string takes everything.
        let _ = self.0.write_fmt(text);
    }
}

/// A value that can stand in a page.
pub(super) trait Part {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// A part on its way into a format string.
pub(super) struct Put<'a, T: ?Sized>(pub(super) &'a T);

impl<T: Part + ?Sized> fmt::Display for Put<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(f)
    }
}

impl Part for Html {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Part for str {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut from = 0;
        for (at, byte) in self.bytes().enumerate() {
            let instead = match byte {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&quot;",
                b'\'' => "&#39;",
                // Server-sent events cannot carry it.
                b'\r' => "&#13;",
                b'\0' => "\u{fffd}",
                _ => continue,
            };
            f.write_str(&self[from..at])?;
            f.write_str(instead)?;
            from = at + 1;
        }
        f.write_str(&self[from..])
    }
}

macro_rules! as_text {
    ($($type:ty => |$it:ident| $text:expr),* $(,)?) => { $(
        impl Part for $type {
            fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let $it = self;
                Part::write($text, f)
            }
        }
    )* };
}

as_text! {
    String => |it| it.as_str(),
    Arc<str> => |it| &**it,
    Cow<'_, str> => |it| &**it,
    QueueName => |it| it.as_str(),
    Kind => |it| it.as_str(),
    JobState => |it| it.as_str(),
    JobId => |it| it.to_string().as_str(),
    FencingToken => |it| it.to_string().as_str(),
}

impl<T: Part + ?Sized> Part for &T {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).write(f)
    }
}

macro_rules! as_number {
    ($($type:ty),*) => { $(
        impl Part for $type {
            fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }
    )* };
}

as_number!(u8, u32, u64, usize, f64);

/// Writes a literal with escaped values into an [`Html`].
macro_rules! put {
    ($html:expr, $text:literal $(, $part:expr)* $(,)?) => {
        // `concat!` keeps the literal from capturing variables, which would not be escaped.
        $html.put(format_args!(concat!($text) $(, $crate::dashboard::html::Put(&$part))*))
    };
}

/// A new [`Html`] from a literal with escaped values.
macro_rules! html {
    ($text:literal $(, $part:expr)* $(,)?) => {{
        let mut html = $crate::dashboard::html::Html::new();
        $crate::dashboard::html::put!(html, $text $(, $part)*);
        html
    }};
}

pub(super) use {html, put};

/// One value of a URL's query, escaped for it.
pub(super) fn query(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                text.push(byte.into());
            }
            _ => {
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_and_html_is_not() {
        let bad = "<script>alert('x' + \"y\") & \r\0</script>";
        let page = html!("<td title=\"{}\">{}</td>", bad, html!("<b>{}</b>", 7_u64));
        assert_eq!(
            page.into_string(),
            "<td title=\"&lt;script&gt;alert(&#39;x&#39; + &quot;y&quot;) &amp; &#13;\u{fffd}&lt;/script&gt;\"><b>7</b></td>"
        );
        assert_eq!(query("a b&c=ü"), "a%20b%26c%3D%C3%BC");
    }
}
