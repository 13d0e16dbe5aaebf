//! The commands in the guide's recipes, each on a store that has what it is about.

use std::process::{Command, Stdio};

use crate::operate::world::{New, on_each_store, stderr};

const GUIDE: &str = include_str!("../../../../../src/guide/operations.md");

/// The lines of the guide's shell blocks.
fn lines() -> Vec<&'static str> {
    let blocks = GUIDE.split("```sh\n").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split("```").next());
    blocks.flat_map(str::lines).collect()
}

on_each_store!(every_command_of_the_recipes_works);

async fn every_command_of_the_recipes_works(new: New) {
    let lines = lines();
    assert!(lines.len() > 20, "{lines:?}");
    for line in lines {
        let place = new();
        let stage = place.world().await.stage().await;
        if line.contains(" rm ") {
            place.text(&["enqueue", "report", "--queue", "empty"]);
            place.text(&[
                "queues", "purge", "empty", "--state", "ready", "--reason", "r", "--yes",
            ]);
        }
        let words = line.split(' ').map(|word| match word {
            "JOB" => stage.late.id.to_string(),
            // One that is there, and has no jobs.
            "QUEUE" if line.contains(" rm ") => "empty".to_owned(),
            "QUEUE" => "day".to_owned(),
            "OWNER" => "host-2".to_owned(),
            "TASK" => "deploy-7".to_owned(),
            word => word.to_owned(),
        });
        let mut script = words.collect::<Vec<_>>().join(" ");
        if [" cancel ", " revoke ", " purge "]
            .iter()
            .any(|word| line.contains(word))
        {
            script += " --yes";
        }
        let script = script.replacen("leasehold", "\"$PROGRAM\"", 1);
        let output = Command::new("sh")
            .args(["-c", &script])
            .env("PROGRAM", env!("CARGO_BIN_EXE_leasehold"))
            .env("LEASEHOLD_URL", &place.url)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {}", stderr(&output));
        assert!(!output.stdout.is_empty(), "{line}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!text.contains(": 0 done"), "{line}: {text}");
    }
}
