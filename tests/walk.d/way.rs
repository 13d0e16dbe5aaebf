//! Reads traces of `life` and prints a job's way through the files, as `tests/walk` defines it.
//!
//! `way ROOT PROGRAM STORE TRACE [TRACE_OF_RETRIED] [--list] [--monitor=FILE] [--functions]`; the
//! file is what Redis' MONITOR printed meanwhile. With `--functions`, `TRACE.functions` names the
//! functions that ran in the server.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A function with at most this many lines of code is trivial.
const TRIVIAL: usize = 3;
/// Trivial whatever their length: usually derived.
const VALUES: [&str; 7] = ["fmt", "deref", "eq", "cmp", "partial_cmp", "hash", "clone"];

fn main() -> Result<(), Box<dyn Error>> {
    let (options, arguments): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|argument| argument.starts_with("--"));
    let is_list = options.iter().any(|option| option == "--list");
    let monitor = options
        .iter()
        .find_map(|option| option.strip_prefix("--monitor="));
    let [root, program, store, traces @ ..] = &arguments[..] else {
        return Err("way ROOT PROGRAM STORE TRACE [RETRIED]".into());
    };
    let mut sources = Sources::new(root, store);
    let mut ways = Vec::new();
    for trace in traces {
        let entries = entries(program, &std::fs::read_to_string(trace)?)?;
        let mut way = Way::of(&entries, &mut sources)?;
        if let Some(monitor) = monitor {
            let times = std::fs::read_to_string(format!("{trace}.times"))?;
            let scripts = scripts(&std::fs::read_to_string(monitor)?, &times)?;
            way.statements.extend(lua_in(root, &scripts));
        }
        if options.iter().any(|option| option == "--functions") {
            // What a function of ours names may not have run, and what it calls has.
            let called = std::fs::read_to_string(format!("{trace}.functions"))?;
            way.statements = sql_in(root, store, &called).into_iter().collect();
        }
        ways.push(way);
    }
    match &ways[..] {
        [plain] => plain.print(store, is_list),
        [plain, retried] => {
            plain.print(store, false);
            retried.print(&format!("{store}, retried"), is_list);
            let files = retried.files.difference(&plain.files);
            let statements = retried.statements.difference(&plain.statements);
            let added: Vec<&str> = files.chain(statements).map(String::as_str).collect();
            println!("  added: {}", added.join(", "));
        }
        _ => return Err("one trace, or two".into()),
    }
    Ok(())
}

/// One function entry, as the program's debug information describes it.
struct Entry {
    symbol: String,
    file: String,
    line: usize,
}

/// The entries in their order.
fn entries(program: &str, trace: &str) -> Result<Vec<Entry>, Box<dyn Error>> {
    let known: HashSet<&str> = trace.lines().collect();
    let known: Vec<&str> = known.into_iter().collect();
    let mut child = Command::new("addr2line")
        .args(["-C", "-f", "-e", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().ok_or("no input")?;
    let asked = known.join("\n") + "\n";
    // A thread, because addr2line answers before it has read everything: both pipes would fill up.
    let asking = std::thread::spawn(move || input.write_all(asked.as_bytes()));
    let output = child.wait_with_output()?;
    asking.join().map_err(|_| "addr2line was not asked")??;
    let text = String::from_utf8(output.stdout)?;
    let mut lines = text.lines();
    let mut found = HashMap::new();
    for address in known {
        let (Some(symbol), Some(place)) = (lines.next(), lines.next()) else {
            return Err("addr2line did not answer".into());
        };
        let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
        // "12 (discriminator 3)"
        let line = line.split(' ').next().and_then(|line| line.parse().ok());
        found.insert(address, (symbol, file, line.unwrap_or(0)));
    }
    let entries = trace.lines().map(|address| {
        let (symbol, file, line) = found[address];
        Entry {
            symbol: symbol.into(),
            file: file.into(),
            line,
        }
    });
    Ok(entries.collect())
}

/// A function in its file.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Stop {
    file: String,
    function: String,
}

/// The bottom of the tree: values, the ledger's sums, and telemetry. Nothing here calls anything
/// above it, so none of it decides where a job goes next.
const VALUE_FILES: [&str; 16] = [
    "src/clock.rs",
    "src/error.rs",
    "src/history.rs",
    "src/inspect.rs",
    "src/job.rs",
    "src/lease.rs",
    "src/limits.rs",
    "src/names.rs",
    "src/observe/",
    "src/panics.rs",
    "src/receipt.rs",
    "src/retry.rs",
    "src/settings.rs",
    "src/sqlite_error.rs",
    "src/terms.rs",
    "src/token.rs",
];

fn is_value(file: &str) -> bool {
    VALUE_FILES.iter().any(|value| file.starts_with(value))
}

struct Way {
    files: BTreeSet<String>,
    /// Files of values and telemetry, counted apart.
    values: BTreeSet<String>,
    /// SQL files, if a function on the way names one of their statements; Lua files, if they are
    /// part of a script that ran.
    statements: BTreeSet<String>,
    switches: Vec<(Stop, Stop)>,
}

impl Way {
    fn of(entries: &[Entry], sources: &mut Sources) -> Result<Self, Box<dyn Error>> {
        let mut way = Self {
            files: BTreeSet::new(),
            values: BTreeSet::new(),
            statements: BTreeSet::new(),
            switches: Vec::new(),
        };
        let mut bodies = Bodies::default();
        let mut is_life = None;
        let mut last: Option<Stop> = None;
        let mut seen = HashSet::new();
        for entry in entries {
            match &entry.symbol[..] {
                "life::life_begins" => is_life = Some(true),
                "life::life_ends" => is_life = Some(false),
                _ => {}
            }
            let is_entered = bodies.enter(&entry.symbol);
            let Some((file, function)) = sources.function(&entry.file, entry.line) else {
                continue;
            };
            if is_life != Some(true) || !is_entered || function.is_trivial() {
                continue;
            }
            if is_value(file) {
                way.values.insert(file.into());
                continue;
            }
            way.files.insert(file.into());
            way.statements.extend(function.statements.iter().cloned());
            let stop = Stop {
                file: file.into(),
                function: function.name.clone(),
            };
            if let Some(last) = last.replace(stop.clone())
                && last.file != stop.file
                && seen.insert((last.clone(), stop.clone()))
            {
                way.switches.push((last, stop));
            }
        }
        match is_life {
            Some(false) => Ok(way),
            _ => Err("the trace has no beginning, or no end".into()),
        }
    }

    fn print(&self, store: &str, is_list: bool) {
        let (files, switches) = (self.files.len(), self.switches.len());
        let values = self.values.len();
        let mut line = format!(
            "{store}: {files} files, {switches} switches, and {values} files of values and telemetry"
        );
        for (ending, language) in [(".sql", "SQL"), (".lua", "Lua")] {
            let count = self
                .statements
                .iter()
                .filter(|file| file.ends_with(ending))
                .count();
            if count > 0 {
                line += &format!(", and {count} files of {language}");
            }
        }
        println!("{line}");
        if is_list {
            for file in self.files.iter().chain(&self.statements) {
                println!("  {file}");
            }
            for file in &self.values {
                println!("  ({file})");
            }
            for (at, (from, to)) in self.switches.iter().enumerate() {
                let from = format!("{} {}", from.file, from.function);
                println!("  {:3}  {from:50} → {} {}", at + 1, to.file, to.function);
            }
        }
    }
}

/// The program enters an async body at every poll, and a closure at every call. Only the first
/// entry counts, until the function around it is entered again.
#[derive(Default)]
struct Bodies {
    entered: HashMap<String, usize>,
    followed: HashMap<String, usize>,
}

impl Bodies {
    /// True if this entry counts.
    fn enter(&mut self, symbol: &str) -> bool {
        if let Some((around, number)) = symbol.rsplit_once("::{closure#")
            && number.ends_with('}')
        {
            let around = self.entered.get(around).copied().unwrap_or(0);
            let before = self.followed.insert(symbol.into(), around);
            if before.is_some_and(|before| before >= around) {
                return false;
            }
        }
        *self.entered.entry(symbol.into()).or_default() += 1;
        true
    }
}

/// A function as it is written.
struct Function {
    name: String,
    /// The first line and the last.
    lines: (usize, usize),
    /// Lines of code between its braces.
    body: usize,
    /// The files of the statements that it names.
    statements: Vec<String>,
}

impl Function {
    fn is_trivial(&self) -> bool {
        self.body <= TRIVIAL || VALUES.contains(&&self.name[..])
    }
}

/// The functions of the files below `src/` and `crates/`, read when first asked for.
struct Sources {
    root: String,
    statements: Vec<Statement>,
    files: HashMap<String, Vec<Function>>,
}

impl Sources {
    fn new(root: &str, store: &str) -> Self {
        Self {
            root: format!("{root}/"),
            statements: statements(root, store),
            files: HashMap::new(),
        }
    }

    /// The file, relative to the root, and the innermost function around the line.
    fn function(&mut self, file: &str, line: usize) -> Option<(&str, &Function)> {
        let at = file.rfind(&self.root).map(|at| at + self.root.len())?;
        let file = &file[at..];
        if !file.starts_with("src/") && !file.starts_with("crates/") {
            return None;
        }
        if !self.files.contains_key(file) {
            let path = Path::new(&self.root).join(file);
            self.files.insert(
                file.into(),
                functions(&path, &self.statements).unwrap_or_default(),
            );
        }
        let (file, functions) = self.files.get_key_value(file)?;
        let around = functions
            .iter()
            .filter(|f| f.lines.0 <= line && line <= f.lines.1);
        Some((file, around.max_by_key(|f| f.lines.0)?))
    }
}

/// The functions of a file. Relies on rustfmt: a function ends at the first closing brace with the
/// indentation of its first line.
fn functions(path: &Path, statements: &[Statement]) -> Result<Vec<Function>, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)?;
    let lines: Vec<&str> = text.lines().collect();
    let mut functions = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let Some(name) = fn_name(code) else { continue };
        let indent = &line[..line.len() - code.len()];
        let ends = |line: &&str| {
            line.strip_prefix(indent)
                .is_some_and(|rest| rest.starts_with('}'))
        };
        let is_one_line = code.ends_with('}') || code.ends_with(';');
        let length = if is_one_line {
            Some(0)
        } else {
            lines[at..].iter().position(ends)
        };
        let Some(length) = length else { continue };
        let whole = &lines[at..=at + length];
        let is_open = |line: &&str| line.ends_with('{');
        let body = whole
            .iter()
            .position(is_open)
            .map_or(&[][..], |open| &whole[open + 1..]);
        let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let named = statements.iter().filter(|(name, _)| {
            let quoted = format!("\"{name}\"");
            whole.iter().any(|line| line.contains(&quoted))
        });
        functions.push(Function {
            name: name.into(),
            lines: (at + 1, at + 1 + length),
            // The last line is the closing brace.
            body: body.iter().filter(is_code).count().saturating_sub(1),
            statements: named.map(|(_, file)| file.clone()).collect(),
        });
    }
    Ok(functions)
}

/// The function that a line declares.
fn fn_name(code: &str) -> Option<&str> {
    let at = if code.starts_with("fn ") {
        3
    } else {
        code.find(" fn ")? + 4
    };
    let words = ["pub", "async", "const", "unsafe", "extern", "fn", "default"];
    let is_declared = |word: &str| words.iter().any(|known| word.starts_with(known));
    if !code[..at]
        .split_whitespace()
        .all(|word| is_declared(word) || word.ends_with(')'))
    {
        return None;
    }
    let name = &code[at..];
    Some(&name[..name.find(|c: char| !c.is_alphanumeric() && c != '_')?])
}

/// A named statement and its file.
type Statement = (String, String);

/// The statements of a store.
fn statements(root: &str, store: &str) -> Vec<Statement> {
    let mut found = Vec::new();
    for (file, text) in files(root, ".sql") {
        if file.contains(&format!("/{store}/")) {
            let names = text
                .lines()
                .filter_map(|line| line.strip_prefix("-- name: "));
            found.extend(names.map(|name| (name.trim().to_owned(), file.clone())));
        }
    }
    found
}

/// The files of the project with this ending, by path relative to the root, and their texts.
fn files(root: &str, ending: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec!["src".to_owned(), "crates".to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(Path::new(root).join(&folder));
        for entry in entries.into_iter().flatten().flatten() {
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.ends_with(ending) {
                let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                found.push((path, text));
            }
        }
    }
    found
}

/// The texts of the functions that were called between the two times, and what all of them share,
/// from the output of Redis' MONITOR.
///
/// The server is new: the first call fails, and the client then sends the library, by
/// `FUNCTION LOAD`. In it each verb is a block of its own.
fn scripts(monitor: &str, times: &str) -> Result<Vec<String>, Box<dyn Error>> {
    let times: Vec<f64> = times.lines().map(str::parse).collect::<Result<_, _>>()?;
    let [begin, end] = times[..] else {
        return Err("not two times".into());
    };
    let mut library = String::new();
    let mut called = BTreeSet::new();
    for line in monitor.lines() {
        // 1795002149.27 [0 127.0.0.1:60138] "FCALL" "leasehold_7b2b1f…_claim" …
        let Some((time, rest)) = line.split_once(' ') else {
            continue;
        };
        let Some((_, command)) = rest.split_once("] ") else {
            continue;
        };
        if let Some(text) = command.strip_prefix("\"FUNCTION\" \"LOAD\" \"") {
            library = unescaped(text);
        } else if let Some(name) = command.strip_prefix("\"FCALL\" \"leasehold_")
            && (begin..end).contains(&time.parse()?)
        {
            let name = name.split('"').next().unwrap_or_default();
            called.extend(name.split_once('_').map(|(_, verb)| verb));
        }
    }
    let mut blocks = library.split("\ndo\n-- ");
    let mut found = vec![blocks.next().unwrap_or_default().to_owned()];
    for block in blocks {
        let is_called = |verb: &&str| block.contains(&format!("register('{verb}',"));
        if called.iter().any(is_called) {
            found.push(format!("-- {block}"));
        }
    }
    if found.len() <= called.len() {
        return Err("a function without text".into());
    }
    Ok(found)
}

/// The text between quotes as it was before MONITOR escaped it.
fn unescaped(text: &str) -> String {
    let mut found = Vec::new();
    let mut rest = text.bytes();
    while let Some(next) = rest.next() {
        match next {
            b'"' => break,
            b'\\' => found.push(match rest.next() {
                Some(b'n') => b'\n',
                Some(b't') => b'\t',
                Some(b'x') => {
                    let mut digit = || char::from(rest.next()?).to_digit(16);
                    let (high, low) = (digit().unwrap_or(0), digit().unwrap_or(0));
                    (high * 16 + low) as u8
                }
                Some(other) => other,
                None => b'\\',
            }),
            other => found.push(other),
        }
    }
    String::from_utf8_lossy(&found).into_owned()
}

/// The SQL files that define one of the functions; but those for who looks, which is `life` itself
/// before and after the job's life.
fn sql_in(root: &str, store: &str, called: &str) -> Vec<String> {
    let sql = files(root, ".sql").into_iter().filter(|(file, text)| {
        let is_defined = |name: &str| text.contains(&format!("FUNCTION leasehold.{name}("));
        let is_look = file.ends_with("/inspect.sql") || file.ends_with("/views.sql");
        file.contains(&format!("/{store}/")) && !is_look && called.lines().any(is_defined)
    });
    sql.map(|(file, _)| file).collect()
}

/// The Lua files that are part of one of the scripts, by how their first line begins: in all of
/// them names have been replaced by numbers.
fn lua_in(root: &str, scripts: &[String]) -> Vec<String> {
    let lua = files(root, ".lua").into_iter().filter(|(_, text)| {
        let words: Vec<&str> = text.split_whitespace().take(5).collect();
        let begins = words.join(" ");
        let is_part = |script: &String| script.lines().any(|line| line.starts_with(&begins));
        scripts.iter().any(is_part)
    });
    lua.map(|(file, _)| file).collect()
}
