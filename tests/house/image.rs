//! The container file names what is there: a package, its program, and files that a build may see.
//! Whether an image comes of it is for who has a builder: it needs a network and half an hour.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

const IMAGE: &str = include_str!("../../contrib/deploy/Containerfile");
const IGNORED: &str = include_str!("../../.dockerignore");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The instructions of a container file, with what goes on in the next line.
fn instructions(text: &str) -> Vec<String> {
    let text = text.replace("\\\n", " ");
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// The default of a build argument.
fn argument(text: &str, name: &str) -> Option<String> {
    let start = format!("ARG {name}=");
    let mut lines = instructions(text).into_iter();
    lines.find_map(|line| line.strip_prefix(&start).map(str::to_owned))
}

/// What is wrong with a container file.
fn wrong(text: &str, workspace: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let [package, binary] = ["PACKAGE", "BINARY"].map(|name| argument(text, name));
    let packages = workspace["packages"].as_array().unwrap();
    let of = packages
        .iter()
        .find(|of| of["name"].as_str() == package.as_deref());
    let has_binary = of.is_some_and(|of| {
        let targets = of["targets"].as_array().unwrap().iter();
        let is_it = |target: &Value| {
            target["name"].as_str() == binary.as_deref() && target["kind"][0] == "bin"
        };
        targets.clone().any(is_it)
    });
    if !has_binary {
        found.push(format!("no program {binary:?} in a package {package:?}"));
    }
    let instructions = instructions(text);
    let stages: Vec<&str> = instructions
        .iter()
        .filter_map(|line| line.strip_prefix("FROM ")?.split_once(" AS "))
        .map(|(_, name)| name)
        .collect();
    let runs: Vec<&String> = (instructions.iter())
        .filter(|line| line.starts_with("RUN "))
        .collect();
    for line in instructions.iter().filter(|line| line.starts_with("COPY ")) {
        let mut words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let stage = words
            .first()
            .and_then(|word| word.strip_prefix("--from="))
            .map(str::to_owned);
        words.retain(|word| !word.starts_with("--"));
        let (to, sources) = words.split_last().unwrap();
        for source in sources {
            let is_there = match &stage {
                // A file of the builder's system, or one that a step has written.
                Some(stage) => {
                    let is_made = runs
                        .iter()
                        .any(|run| run.split(' ').any(|word| word == *source));
                    stages.contains(&stage.as_str()) && (source.starts_with("/etc/") || is_made)
                }
                None => root().join(source).exists(),
            };
            if !is_there {
                found.push(format!("{source} is not there to be copied to {to}"));
            }
        }
    }
    // With --locked the lock file has to be there and to fit.
    let program = instructions
        .iter()
        .rev()
        .find(|line| line.starts_with("ENTRYPOINT "));
    let copied = |path: &str| {
        let copies = instructions.iter().filter(|line| line.starts_with("COPY "));
        copies.clone().any(|line| line.ends_with(path))
    };
    match program.and_then(|line| line.split('"').nth(1)) {
        Some(path) if copied(path) => {}
        path => found.push(format!("nobody has copied the program to {path:?}")),
    }
    found
}

fn workspace() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let said = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(root())
        .output()
        .unwrap();
    serde_json::from_slice(&said.stdout).unwrap()
}

#[test]
fn the_container_file_builds_what_is_there() {
    let workspace = workspace();
    assert_eq!(wrong(IMAGE, &workspace), Vec::<String>::new());
    // The control arm.
    for (right, mistake) in [
        ("ARG BINARY=leasehold", "ARG BINARY=lease"),
        ("ARG PACKAGE=leasehold-cli", "ARG PACKAGE=leasehold-command"),
        ("COPY . .", "COPY sources ."),
        ("--from=build /program", "--from=builder /program"),
        ("--from=build /program", "--from=build /programme"),
        ("/usr/local/bin/program\"]", "/usr/local/bin/worker\"]"),
    ] {
        assert!(IMAGE.contains(right), "{right}");
        let found = wrong(&IMAGE.replace(right, mistake), &workspace);
        assert_eq!(found.len(), 1, "{mistake}: {found:?}");
    }
}

/// What is left out of the builder's sight: nothing that is in the repository, and all that a build
/// leaves behind.
#[test]
fn the_builder_sees_the_sources() {
    let ignored: Vec<&str> = IGNORED
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    assert_eq!(ignored, ["target", "**/target", ".git"]);
    for needed in [
        "Cargo.toml",
        "Cargo.lock",
        "src/lib.rs",
        "crates/leasehold-cli/Cargo.toml",
    ] {
        assert!(root().join(needed).is_file(), "{needed}");
    }
}
