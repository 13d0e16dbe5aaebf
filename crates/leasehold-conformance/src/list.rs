//! The list of all cases: the one place that names them, so that every store runs every one.

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_cases {
    ($with:ident [$($args:tt)*]) => {
        $crate::$with! { [$($args)*]
            enqueue {
                due_is_ready_and_later_is_scheduled
                everything_given_reaches_the_claim
                run_at_is_the_stores_now_plus_the_delay
                answers_come_in_order
                nothing_is_fine
                one_call_serves_many_queues
                limits_are_inclusive
                payload_over_the_limit_is_refused
                headers_over_the_limit_are_refused
                a_version_under_one_is_refused
                priority_over_the_limit_is_refused
                expiry_limit_under_three_is_refused
                durations_over_the_limit_are_refused
                jobs_over_the_limit_are_refused
                bytes_over_the_limit_are_refused
                names_and_keys_are_checked
                an_id_is_free_once_its_job_is_gone
                an_id_that_is_there_is_a_duplicate
                an_id_twice_in_a_call_is_stored_once
            }
            claim {
                serves_in_order_of_arrival
                serves_by_priority
                expired_jobs_go_to_the_front_in_token_order
                surrendered_jobs_go_to_the_front_in_token_order
                the_last_step_is_first_at_the_front
                the_front_is_within_the_priority
                retried_jobs_go_to_the_back
                promotes_by_due_time
                promotes_at_the_exact_time
                expires_then_promotes_then_grants
                expires_a_thousand_in_a_step
                promotes_a_thousand_in_a_step
                gives_no_more_than_asked
                visits_queues_in_order
                a_queue_named_twice_is_one_queue
                zero_bytes_are_refused
                unknown_queues_are_empty
                a_paused_queue_grants_nothing
                tokens_grow
                tokens_follow_the_clock
                claims_go_on_when_the_clock_is_set_back
                tokens_grow_across_sessions
                names_owner_and_task
                grants_the_term_cut_by_the_lifetime
                a_jobs_own_terms_win
                grants_never_mix_terms
                grants_are_at_most_four_mebibytes
                histories_weigh_too
                tells_what_comes_next
                tells_what_comes_first_of_several_queues
                suspects_are_granted_on_request_only
                a_claim_gets_one_suspect
                one_suspect_of_several_queues
                suspects_are_first_within_their_priority
                a_suspect_stays_one
                limits_are_checked
                no_job_goes_to_two_claimers
                a_surrenders_mark_raises_the_floor
                a_mark_stops_no_other_queue
                each_claim_brings_its_terms
                expires_all_that_is_overdue
                as_many_as_asked_of_several_queues
                finding_nothing_needs_no_token
                overdue_is_work_while_the_clock_is_behind
                a_surrender_is_work_while_the_clock_is_behind
                visits_no_queue_in_vain
                siblings_of_a_late_settlement_expire
                as_many_tokens_as_fit
                tokens_grow_across_queues
                bytes_are_counted_to_the_last
                a_suspect_that_is_gone_is_in_nobodys_way
                tells_nothing_of_other_queues
                the_moment_itself_counts
            }
            renew {
                grants_a_term_from_now
                never_goes_beyond_the_lifetime
                the_claims_lifetime_holds
                never_resurrects
                refused_from_the_deadline_on
                renews_until_the_deadline
                each_until_its_own_deadline
                each_by_its_own_terms
                each_for_its_own_lifetime
                each_for_its_own_lifetime_after_a_time_apart
                lapses_beside_a_first_progress
                foreign_beats_are_fenced
                ended_leases_are_fenced
                siblings_of_an_ended_lease_live_on
                a_lapsed_lease_expires_alone
                lapsed_leases_go_to_the_front
                lapsing_all_is_fenced
                lapses_count_toward_the_expiry_limit
                an_overdue_lease_does_not_lapse
                tells_of_a_cancel
                keeps_the_last_progress
                answers_each_beat
                is_never_replayed
                limits_are_checked
                a_renewed_lease_is_not_late
                foreign_leases_do_not_lapse
                foreign_leases_are_not_renewed
                a_cancel_is_told_of_one_lease
                a_cancelled_job_lapses_into_cancelled
                refused_renewals_are_not_counted
                a_lapsed_lease_is_gone_for_the_next_beat
                any_leases_of_a_grant
                fenced_progress_is_not_kept
                each_grant_of_a_call_is_its_own
            }
            fence {
                after_expiry
                after_settlement
                after_revoke
                after_lapse
                a_guessed_receipt_is_fenced
                a_mixed_receipt_is_fenced
                a_receipt_of_nowhere_is_fenced
                a_receipt_of_no_partition_is_fenced
                a_zombie_frees_no_key
                a_zombie_saves_no_checkpoint
                a_receipt_survives_its_text
                setting_the_clock_back_revives_nothing
                a_forged_proof_beside_good_ones
                a_forged_proof_beside_good_completions
                a_mixed_receipt_beside_good_ones
                a_proof_is_of_one_claim
                a_token_beside_its_grant_is_fenced
            }
            settle {
                complete_deletes_without_retention
                complete_keeps_the_result
                retry_counts_a_failure
                retry_at_once
                surrender_counts_nothing
                snooze_waits_and_counts_nothing
                decline_waits_and_counts_nothing
                declined_since_the_first_of_a_row
                bury_makes_dead
                failures_never_kill_a_job
                late_is_accepted_and_counted
                late_is_counted_of_cancelled_jobs
                late_begins_at_the_deadline
                late_begins_at_the_deadline_they_share
                grants_complete_in_turns
                a_receipt_settles_once
                verdicts_come_in_order
                nothing_is_fine
                leases_of_a_grant_end_apart
                an_unbelievable_mark_is_a_failure
                eight_ended_leases_are_remembered
                a_long_reason_is_cut
                limits_are_checked
                many_in_one_call
                leases_of_several_queues
                two_grants_of_one_claim
                each_in_its_own_way
                late_is_told_of_each_grant
                a_cancel_is_told_of_one_lease
                a_mark_is_believed_up_to_a_day
                what_is_left_of_a_grant_is_whole
                complete_with_keys_and_retention
                many_go_to_the_front_together
                each_reason_of_a_call_is_its_own
            }
            checkpoint {
                the_next_claim_gets_it
                it_survives_every_end
                sequence_never_falls
                a_new_token_starts_anew
                late_is_accepted
                a_cancel_is_told
                it_extends_nothing
                answers_come_in_order
                each_state_of_a_call_is_its_own
                empty_state_is_state
                limits_are_checked
                the_same_sequence_is_written_over
                sequences_are_whole_numbers
                each_lease_saves_its_own
                an_ended_lease_takes_only_its_own_along
            }
            expire {
                begins_at_the_deadline
                a_claim_needs_no_reaper
                the_report_is_complete
                nothing_is_counted_twice
                the_oldest_first
                part_of_a_grant
                the_limit_makes_dead
                deaths_only_grow
                failures_do_not_count
                limits_are_checked
                a_clock_set_back_expires_nothing
                a_dead_fleet_is_reaped_in_steps
                exactly_as_many_as_asked
                the_living_stay
                every_cause_counts_toward_the_limit
                many_small_grants
            }
            control {
                every_command_is_on_record
                an_empty_queue_is_removed
                a_queue_removed_by_a_clock_set_back_gives_no_token_twice
                a_command_in_vain_is_on_record
                anonymous_commands_are_refused
                zero_bytes_are_refused
                limits_are_checked
                pause_stops_one_queue
                pause_comes_before_the_first_job
                holders_do_not_notice_a_pause
                cancel_of_a_pending_job
                cancel_of_a_job_that_is_gone
                cancel_of_a_leased_job_is_a_flag
                complete_and_bury_win_over_cancel
                retry_and_surrender_end_in_cancelled
                expiry_ends_in_cancelled
                revoke_ends_in_cancelled
                a_dead_jobs_cancel_does_not_follow_it
                cancel_by_state
                revoke_by_job
                revoke_by_owner_and_task
                revoke_of_an_overdue_lease
                retry_dead_gives_another_life
                retry_dead_clears_the_suspicion
                retry_dead_skips_the_living
                retry_dead_needs_its_unique_key
                purge_skips_leased
                reschedule_skips_leased
                reschedule_to_now
            }
            inspect {
                an_empty_store_shows_nothing
                queues_come_by_name
                parked_jobs_are_counted_by_key
                counts_are_right
                oldest_ready_tells_the_wait
                ready_jobs_in_order
                the_front_is_listed_first
                parked_jobs_are_listed
                scheduled_jobs_by_due_time
                leased_jobs_with_their_lease
                settled_jobs_in_order_of_their_end
                leases_by_deadline
                leases_by_queue_owner_and_task
                audit_newest_first
                a_full_last_page_is_the_last
                limits_are_checked
                looking_changes_nothing
                a_dedicated_handle_is_the_same_store
            }
            wait {
                returns_at_once_if_there_is_work
                gives_up_at_its_limit
                wakes_on_enqueue
                wakes_on_enqueue_of_another
                wakes_for_any_of_its_queues
                wakes_on_an_earlier_due_enqueue
                wakes_on_resume
                wakes_on_surrender
                wakes_on_expiry
                wakes_on_a_freed_key
                wakes_on_retry_dead
                sleeps_over_suspects_unless_asked
                wakes_for_a_suspect_if_asked
                sleeps_over_a_paused_queue
                sleeps_over_other_queues
                sleeps_over_parked_jobs
                many_sleepers_wake_for_many_jobs
                a_sleeper_that_is_gone_takes_no_wakeup
            }
            prune {
                completed_jobs_go_when_their_time_is_over
                zero_retention_waits_for_the_prune
                cancelled_jobs_stay_a_day
                dead_jobs_stay
                the_living_stay
                is_bounded
                overdue_gives_a_margin
                windows_outlive_pruned_jobs
                limits_are_checked
            }
            repeat {
                enqueue_stores_once
                enqueue_does_not_revive
                claim_grants_once
                claim_tells_what_comes_next
                claim_lists_the_living
                claim_brings_what_was_saved
                claim_lists_nothing_overdue
                claim_reports_its_expiries_again
                claim_of_nothing_stays_nothing
                settle_settles_once
                many_settle_once
                settle_under_a_new_id_is_fenced
                checkpoint_saves_once
                reap_expires_once
                reap_goes_nowhere_else
                control_acts_once
                a_repeated_revoke_spares_the_next_holder
                prune_deletes_once
                an_older_sequence_is_refused
                an_unopened_session_is_refused
                an_idle_session_is_refused
                a_reap_of_nothing_keeps_its_session
                a_call_to_nowhere_keeps_its_session
                a_repeat_after_the_end_is_refused
                sessions_are_never_reused
                lanes_are_independent
                sessions_are_independent
                a_refused_call_uses_up_nothing
                an_id_names_one_verb
                a_clock_set_back_ends_no_session
            }
            keys {
                a_second_job_is_a_duplicate
                duplicates_within_a_call
                keys_do_not_collide
                held_through_the_whole_life
                held_through_the_retries_of_a_relaxed_queue
                freed_at_the_end
                freed_by_the_expiry_limit
                only_the_holder_frees_it
                a_window_outlives_the_job
                a_window_can_end_before_the_job
                a_purge_leaves_the_window
                retry_dead_of_many
            }
            exclusive {
                one_at_a_time
                the_next_follows_at_the_end
                the_next_may_fall_due_as_the_head_ends
                the_next_goes_to_the_back
                priorities_do_not_count_within_the_line
                delayed_jobs_join_when_due
                due_together_join_in_order
                surrender_keeps_the_head
                expiry_keeps_the_head
                revoke_keeps_the_head
                retry_keeps_the_head_in_strict_order
                every_retry_keeps_the_head_in_strict_order
                snooze_keeps_the_head
                retry_frees_the_key_when_relaxed
                relaxed_keeps_the_head_otherwise
                cancel_of_head_and_parked
                cancel_of_a_waiting_head
                purge_of_head_and_parked
                purge_of_the_whole_line
                reschedule_of_the_head
                reschedule_of_the_head_to_now
                reschedule_of_a_parked_job
                reschedule_of_a_waiting_head
                retry_dead_joins_at_the_end
                the_expiry_limit_frees_the_key
                a_suspect_blocks_its_own_line_only
                a_key_belongs_to_its_queue
                blocked_jobs_are_not_in_the_way
                many_lines_side_by_side
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
            ("enqueue", include_str!("enqueue.rs")),
            ("claim", include_str!("claim.rs")),
            ("renew", include_str!("renew.rs")),
            ("fence", include_str!("fence.rs")),
            ("settle", include_str!("settle.rs")),
            ("checkpoint", include_str!("checkpoint.rs")),
            ("expire", include_str!("expire.rs")),
            ("control", include_str!("control.rs")),
            ("inspect", include_str!("inspect.rs")),
            ("wait", include_str!("wait.rs")),
            ("prune", include_str!("prune.rs")),
            ("repeat", include_str!("repeat.rs")),
            ("keys", include_str!("keys.rs")),
            ("exclusive", include_str!("exclusive.rs")),
        ];
        let mut written = Vec::new();
        for (verb, text) in files {
            for line in text.lines() {
                if let Some(rest) = line.strip_prefix("pub async fn ") {
                    let name = rest.split('(').next().unwrap_or_default();
                    written.push((verb, name));
                }
            }
        }
        let mut listed: Vec<_> = cases().iter().map(|case| (case.verb, case.name)).collect();
        written.sort_unstable();
        listed.sort_unstable();
        assert_eq!(written, listed);
    }
}
