//! The alert rules of `contrib/prometheus`: each case by case, and on a live Prometheus while the
//! store is away.

mod outage;
mod rules;

const RULES: &str = include_str!("../../../../../contrib/prometheus/alerts.yml");
