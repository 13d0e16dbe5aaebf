//! The list of all cases: the one place that names them, so that every store runs every one.

#[doc(hidden)]
#[macro_export]
macro_rules! __holding_cases {
    ($with:ident [$($args:tt)*]) => {
        $crate::$with! { [$($args)*]
            acquire {
                names_conflict
                paths_conflict
                ranges_conflict
                kinds_and_families_are_apart
                shared_excludes_exclusive
                all_or_none
                asks_are_served_in_order
                tokens_grow
                tokens_grow_when_the_clock_is_set_back
                a_clock_set_back_revives_nothing
                grants_the_term
                busy_names_the_holders
                busy_names_eight_holders
                not_re_entrant
                a_deadline_needs_no_process
                a_step_expires_what_it_does_not_need
                a_step_is_bounded
                asking_again_extends_nothing
                a_nonce_names_one_ask
                rests_after_an_expiry
                a_rest_is_as_the_holding_was
                one_partition_per_ask
                limits_are_checked
                a_check_tells_by_the_clock
            }
            ends {
                renewals_grant_a_term_from_now
                a_renewal_never_resurrects
                foreign_receipts_are_fenced
                a_lapse_is_an_expiry
                an_overdue_holding_does_not_lapse
                keeps_the_last_progress
                a_release_ends_once
                late_is_accepted_and_counted
                an_ask_is_taken_back
                state_reaches_the_next_holder
                state_never_goes_back
                a_large_state_is_refused
                a_mark_raises_the_floor
                scopes_are_remembered_for_a_while
                what_is_held_is_not_forgotten
            }
            tickets {
                served_in_line
                a_ticket_is_a_lease
                dead_waiters_delay_once
                a_late_waiter_goes_to_the_end
                waiting_is_transitive
                in_line_for_all_scopes
                sharers_do_not_starve_a_writer
                units_wait_in_line
                a_last_try_leaves_no_ticket
                a_ticket_is_taken_back
                tickets_are_dropped
                contended_scopes_are_shown
                a_release_wakes_the_first
                a_ticket_that_goes_wakes
                more_units_wake
                each_grant_wakes_on
                a_wait_ends
            }
            units {
                units_are_counted
                units_of_several_names
                units_beside_other_modes
                more_than_there_are
                lowering_ends_nothing
                units_come_back
                committed_units_are_used_up
                overdue_commits_are_fenced
                only_units_are_committed
                units_rest
            }
            control {
                a_revoke_ends_now
                revoke_by_each_selection
                an_overdue_holding_is_not_revoked
                rests_after_a_revoke
                a_recall_bounds_renewals
                a_recall_shortens_no_deadline
                commands_are_checked
                views_show_what_is_there
                a_dedicated_handle_is_the_same_store
            }
            repeats {
                acquire_grants_once
                acquire_answers_the_living
                every_call_acts_once
                a_late_copy_leaves_no_ghost
                an_id_names_one_verb
            }
            random {
                names
                paths
                ranges
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::super::cases;

    /// A case that is written and not listed would never run.
    #[test]
    fn every_case_is_listed() {
        let files = [
            ("acquire", include_str!("acquire.rs")),
            ("ends", include_str!("ends.rs")),
            ("tickets", include_str!("tickets.rs")),
            ("units", include_str!("units.rs")),
            ("control", include_str!("control.rs")),
            ("repeats", include_str!("repeats.rs")),
            ("random", include_str!("random.rs")),
        ];
        let mut written = Vec::new();
        for (group, text) in files {
            let cases = text
                .lines()
                .filter(|line| line.contains("(d: &HoldingDriver) {"));
            let names = cases.filter_map(|line| line.strip_prefix("pub async fn "));
            written.extend(names.filter_map(|rest| Some((group, rest.split_once('(')?.0))));
        }
        let mut listed: Vec<_> = cases().iter().map(|case| (case.group, case.name)).collect();
        written.sort_unstable();
        listed.sort_unstable();
        assert_eq!(written, listed);
    }
}
