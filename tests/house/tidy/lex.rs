//! Separates code from comments and strings, in Rust, SQL and Lua. It knows where these begin and
//! end, and nothing else about the languages.

/// The languages whose comments and strings are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Language {
    Rust,
    Sql,
    Lua,
}

/// A source text, split into its parts.
#[derive(Default, Debug)]
pub(crate) struct Lexed {
    /// The text with comments and the contents of strings blanked. Byte offsets are the same as in
    /// the text.
    pub(crate) code: String,
    /// Every comment line, with its line number.
    pub(crate) comments: Vec<(usize, String)>,
    /// Every string, with the byte offset of its contents.
    pub(crate) strings: Vec<(usize, String)>,
}

impl Lexed {
    pub(crate) fn of(text: &str, language: Language) -> Self {
        let mut lexed = Self::default();
        let mut code = text.as_bytes().to_vec();
        let (mut at, mut line, mut counted) = (0, 1, 0);
        while at < text.len() {
            let rest = &text.as_bytes()[at..];
            let Some(piece) = Piece::at_start(rest, before(text, at), language) else {
                at += 1;
                continue;
            };
            let (from, to) = (at + piece.open, at + piece.length - piece.close);
            if piece.is_comment {
                line += line_of(&text[counted..], at - counted) - 1;
                counted = at;
                let lines = text[at..at + piece.length].lines().enumerate();
                let numbered = lines.map(|(n, text)| (line + n, text.to_owned()));
                lexed.comments.extend(numbered);
                blank(&mut code[at..at + piece.length]);
            } else {
                lexed.strings.push((from, text[from..to].to_owned()));
                blank(&mut code[from..to]);
            }
            at += piece.length;
        }
        // Only whole strings and comments were blanked, so this is still UTF-8.
        lexed.code = String::from_utf8(code).unwrap_or_default();
        lexed
    }
}

/// The line number of a byte offset, counted from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    1 + text[..at].matches('\n').count()
}

pub(crate) fn blank(bytes: &mut [u8]) {
    bytes
        .iter_mut()
        .filter(|byte| **byte != b'\n')
        .for_each(|byte| *byte = b' ');
}

fn before(text: &str, at: usize) -> u8 {
    at.checked_sub(1).map_or(b' ', |at| text.as_bytes()[at])
}

/// A comment or a string, with its quotes.
struct Piece {
    is_comment: bool,
    length: usize,
    /// The lengths of the quotes.
    open: usize,
    close: usize,
}

impl Piece {
    fn comment(length: usize) -> Self {
        Self {
            is_comment: true,
            length,
            open: 0,
            close: 0,
        }
    }

    fn string(open: usize, inside: usize, close: usize) -> Self {
        Self {
            is_comment: false,
            length: open + inside + close,
            open,
            close,
        }
    }

    fn at_start(text: &[u8], before: u8, language: Language) -> Option<Self> {
        match language {
            Language::Rust => Self::of_rust(text, before),
            Language::Sql => match text {
                [b'-', b'-', ..] => Some(Self::comment(line(text))),
                [b'/', b'*', ..] => Some(Self::comment(block(text))),
                [b'\'', ..] => Some(quoted(text, b'\'', false)),
                _ => None,
            },
            Language::Lua => match text {
                [b'-', b'-', b'[', b'[', ..] => Some(Self::comment(until(text, b"]]"))),
                [b'-', b'-', ..] => Some(Self::comment(line(text))),
                [quote @ (b'\'' | b'"'), ..] => Some(quoted(text, *quote, true)),
                _ => None,
            },
        }
    }

    fn of_rust(text: &[u8], before: u8) -> Option<Self> {
        match text {
            [b'/', b'/', ..] => Some(Self::comment(line(text))),
            [b'/', b'*', ..] => Some(Self::comment(block(text))),
            [b'"', ..] => Some(quoted(text, b'"', true)),
            [b'r', ..] if !is_word(before) || before == b'b' => {
                let hashes = text[1..].iter().take_while(|byte| **byte == b'#').count();
                if text.get(1 + hashes) != Some(&b'"') {
                    return None;
                }
                let end = [&b"\""[..], &vec![b'#'; hashes]].concat();
                let inside = until(&text[2 + hashes..], &end) - end.len();
                Some(Self::string(2 + hashes, inside, end.len()))
            }
            [b'\'', b'\\', ..] => Some(quoted(text, b'\'', true)),
            // A character literal or a lifetime.
            [b'\'', rest @ ..] => {
                let character = rest
                    .iter()
                    .skip(1)
                    .take(4)
                    .position(|byte| *byte == b'\'')?
                    + 1;
                let is_one = std::str::from_utf8(&rest[..character])
                    .is_ok_and(|text| text.chars().count() == 1);
                is_one.then(|| Self::string(1, character, 1))
            }
            _ => None,
        }
    }
}

/// Up to the end of the line.
fn line(text: &[u8]) -> usize {
    text.iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(text.len())
}

/// Up to and with `end`.
fn until(text: &[u8], end: &[u8]) -> usize {
    let at = text.windows(end.len()).position(|window| window == end);
    at.map_or(text.len(), |at| at + end.len())
}

/// The length of a block comment. They nest.
fn block(text: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        match &text[at..] {
            [b'/', b'*', ..] => (at, depth) = (at + 2, depth + 1),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
    }
    text.len()
}

fn quoted(text: &[u8], quote: u8, has_escapes: bool) -> Piece {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if has_escapes && text[at] == b'\\' {
            2
        } else {
            1
        };
    }
    if at < text.len() {
        Piece::string(1, at - 1, 1)
    } else {
        Piece::string(1, text.len() - 1, 0)
    }
}

pub(crate) const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 128
}

/// The words of a text (names, keywords, numbers) with their byte offsets.
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let bytes = code.as_bytes();
        at += bytes[at..].iter().position(|byte| is_word(*byte))?;
        let from = at;
        let length = bytes[at..].iter().position(|byte| !is_word(*byte));
        at = length.map_or(bytes.len(), |length| at + length);
        Some((from, &code[from..at]))
    })
}

/// The offset just after the bracket that closes the one at `open`.
pub(crate) fn closed(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

/// The code with every `#[cfg(test)]` item blanked.
pub(crate) fn without_tests(code: &str) -> String {
    let mut bytes = code.as_bytes().to_vec();
    let mut from = 0;
    while let Some(at) = code[from..].find("#[cfg(").map(|at| from + at) {
        let end = closed(code, at + 1);
        from = end;
        if words(&code[at..end]).any(|(_, word)| word == "test") && !code[at..end].contains("not(")
        {
            from = item_end(code, end);
            blank(&mut bytes[at..from]);
        }
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// The end of the item that starts, with its attributes, at `from`.
fn item_end(code: &str, from: usize) -> usize {
    let mut at = from;
    while let Some(byte) = code.as_bytes().get(at) {
        match byte {
            b';' => return at + 1,
            b'{' => return closed(code, at),
            b'(' | b'[' => at = closed(code, at),
            _ => at += 1,
        }
    }
    code.len()
}

#[test]
fn rust_is_taken_apart() {
    let text = "let a = \"x // y\"; // one \"z\"\n/* two\n /* in */ three */ fn b<'a>(c: &'a str) {}\n\
                let d = ('\"', '\\'', r#\"raw \"q\" \"#, b'x', br\"y\", 'ü'); // end";
    let lexed = Lexed::of(text, Language::Rust);
    assert_eq!(lexed.code.len(), text.len());
    let comments: Vec<(usize, &str)> = lexed.comments.iter().map(|(n, c)| (*n, &c[..])).collect();
    let expected = [
        (1, "// one \"z\""),
        (2, "/* two"),
        (3, " /* in */ three */"),
        (4, "// end"),
    ];
    assert_eq!(comments, expected);
    let strings: Vec<&str> = lexed.strings.iter().map(|(_, s)| &s[..]).collect();
    assert_eq!(
        strings,
        ["x // y", "\"", "\\'", "raw \"q\" ", "x", "y", "ü"]
    );
    for (at, string) in &lexed.strings {
        assert_eq!(&text[*at..at + string.len()], string);
    }
    let names: Vec<&str> = words(&lexed.code).map(|(_, word)| word).collect();
    let expected = [
        "let", "a", "fn", "b", "a", "c", "a", "str", "let", "d", "r", "b", "br",
    ];
    assert_eq!(names, expected);
    assert_eq!(line_of(text, text.find("fn b").unwrap()), 3);
}

#[test]
fn sql_and_lua_are_taken_apart() {
    let sql = Lexed::of(
        "-- why\nSELECT 'it''s -- not' /* a */ FROM t",
        Language::Sql,
    );
    assert_eq!(sql.comments.len(), 2);
    assert!(sql.code.contains("SELECT") && !sql.code.contains("not"));
    let lua = Lexed::of("local a = '--' -- b\n--[[ c\n d ]] e()", Language::Lua);
    assert_eq!(lua.comments.len(), 3);
    assert_eq!(words(&lua.code).count(), 3);
}

#[test]
fn tests_are_left_out() {
    let code = "fn a() {}\n#[cfg(test)]\n#[path(x)]\nmod b { fn c() {} }\n#[cfg(all(test, unix))]\nuse d;\n\
                #[cfg(not(test))]\nfn e() {}\n#[cfg(unix)]\nfn f() {}";
    let shipped = without_tests(code);
    let names: Vec<&str> = words(&shipped).map(|(_, word)| word).collect();
    let expected = [
        "fn", "a", "cfg", "not", "test", "fn", "e", "cfg", "unix", "fn", "f",
    ];
    assert_eq!(names, expected);
}
