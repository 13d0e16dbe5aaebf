//! One trace through the store: W3C trace context in a job's headers.
//!
//! With the feature `otel`, an enqueue writes the context of its span into `traceparent` and
//! `tracestate`, and the span of each run links to it. It is a link, not a parent: a job may run
//! hours later, several times, and in a batch that others began, so each run is a trace of its own.
//! Headers that the caller gave are left as they are, and linked to. Without the feature nothing
//! reads or writes them.

#[cfg(not(feature = "otel"))]
pub(crate) use absent::{inject, link};
#[cfg(feature = "otel")]
pub(crate) use present::{inject, link};

#[cfg(not(feature = "otel"))]
mod absent {
    use crate::job::{Headers, NewJob};

    pub(crate) fn inject(_: &mut [NewJob]) {}

    pub(crate) fn link(_: &tracing::Span, _: &Headers) {}
}

#[cfg(feature = "otel")]
mod present {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    };
    use tracing::Span;
    use tracing_opentelemetry::OpenTelemetrySpanExt as _;

    use crate::job::{Headers, NewJob};

    const PARENT: &str = "traceparent";
    const STATE: &str = "tracestate";

    /// Writes the context of the current span into the headers of jobs that have none yet.
    pub(crate) fn inject(jobs: &mut [NewJob]) {
        let context = Span::current().context();
        let span = context.span();
        let context = span.span_context();
        if !context.is_valid() {
            return;
        }
        let parent = traceparent(context);
        let state = context.trace_state().header();
        for job in jobs {
            if header(&job.headers, PARENT).is_some() {
                continue;
            }
            let given = job.headers.len();
            job.headers.push((PARENT.to_owned(), parent.clone()));
            if !state.is_empty() && header(&job.headers, STATE).is_none() {
                job.headers.push((STATE.to_owned(), state.clone()));
            }
            // A job that is full of headers goes without rather than not at all.
            if job.validate().is_err() {
                job.headers.truncate(given);
            }
        }
    }

    /// Links a span to the context in a job's headers, if there is a good one.
    pub(crate) fn link(span: &Span, headers: &Headers) {
        if span.is_disabled() {
            return;
        }
        let Some(parent) = header(headers, PARENT) else {
            return;
        };
        let state = header(headers, STATE).and_then(|state| state.parse().ok());
        if let Some(context) = parse(parent, state.unwrap_or_default()) {
            span.add_link(context);
        }
    }

    fn header<'a>(headers: &'a Headers, name: &str) -> Option<&'a str> {
        let found = headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    fn traceparent(context: &SpanContext) -> String {
        let flags = context.trace_flags() & TraceFlags::SAMPLED;
        format!(
            "00-{}-{}-{flags:02x}",
            context.trace_id(),
            context.span_id()
        )
    }

    fn parse(text: &str, state: TraceState) -> Option<SpanContext> {
        let mut parts = text.split('-');
        let mut part = |digits: usize| {
            let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            parts
                .next()
                .filter(|part| part.len() == digits && part.bytes().all(hex))
        };
        let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // A later version may say more; this one may not, and ff is none.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
        let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        let context = SpanContext::new(trace, span, flags, true, state);
        context.is_valid().then_some(context)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn only_what_w3c_calls_a_context_is_one() {
            let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
            let context = parse(good, TraceState::default()).unwrap();
            assert!(context.is_sampled() && context.is_remote());
            assert_eq!(traceparent(&context), good);
            let later = format!("cc{}-what-follows", &good[2..]);
            assert_eq!(parse(&later, TraceState::default()), Some(context));
            for wrong in [
                "",
                "00-1",
                &format!("{good}-more"),
                &format!("ff{}", &good[2..]),
                &good.to_uppercase(),
                &good.replace("b7ad6b7169203331", "0000000000000000"),
                &good.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
                &good.replace("-01", "-1"),
                &good.replace("b7ad", "+7ad"),
            ] {
                assert_eq!(parse(wrong, TraceState::default()), None, "{wrong:?}");
            }
        }
    }
}
