//! A browser of our own: chromedriver on a free port, driven over plain HTTP.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::http::{LONG, send};

pub(crate) struct Browser {
    driver: Child,
    at: SocketAddr,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    pub(crate) async fn open() -> Self {
        Self::sized(1280, 860).await
    }

    pub(crate) async fn sized(width: u32, height: u32) -> Self {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver is not installed: ./tests/run installs it");
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines
            .find_map(|line| {
                let line = line.unwrap();
                let (_, rest) = line.split_once("started successfully on port ")?;
                rest.trim_end_matches('.').parse::<u16>().ok()
            })
            .expect("chromedriver did not start");
        // Somebody must read what it goes on saying.
        std::thread::spawn(move || lines.for_each(drop));
        let profile = tempfile::tempdir().unwrap();
        let mut arguments: Vec<String> = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        .map(str::to_owned)
        .into();
        arguments.push(format!("--user-data-dir={}", profile.path().display()));
        arguments.push(format!("--window-size={width},{height}"));
        let mut browser = Self {
            driver,
            at: SocketAddr::from(([127, 0, 0, 1], port)),
            session: String::new(),
            _profile: profile,
        };
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let session = browser.ask("POST", "/session", &wanted).await;
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        // The window is a little larger than the page: the page is what has to have this size.
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        browser
            .devtools("Emulation.setDeviceMetricsOverride", &metrics)
            .await;
        browser
    }

    async fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let asked = self.try_ask(method, path, body).await;
        asked.unwrap_or_else(|refused| panic!("{method} {path}: {refused}"))
    }

    /// The value of the answer, or what was refused and why.
    async fn try_ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, Value> {
        let path = format!("{}{path}", self.session);
        let body = if method == "GET" {
            String::new()
        } else {
            body.to_string()
        };
        let headers = ["Content-Type: application/json; charset=utf-8"];
        let answer = send(self.at, method, &path, &headers, &body).await;
        let mut value: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        if answer.status == 200 {
            Ok(value["value"].take())
        } else {
            Err(value["value"].take())
        }
    }

    pub(crate) async fn devtools(&self, command: &str, arguments: &Value) -> Value {
        let body = json!({ "cmd": command, "params": arguments });
        self.ask("POST", "/goog/cdp/execute", &body).await
    }

    pub(crate) async fn go(&self, url: &str) {
        self.ask("POST", "/url", &json!({ "url": url })).await;
    }

    /// The value of an expression on the page.
    pub(crate) async fn value(&self, expression: &str) -> Value {
        let script = format!("return ({expression});");
        self.ask(
            "POST",
            "/execute/sync",
            &json!({ "script": script, "args": [] }),
        )
        .await
    }

    pub(crate) async fn text(&self, selector: &str) -> String {
        let found = self
            .value(&format!(
                "document.querySelector({})?.innerText ?? ''",
                json!(selector)
            ))
            .await;
        found.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an expression is true. While a page makes room for the next there may be nothing
    /// to ask: that is no answer.
    pub(crate) async fn until(&self, expression: &str) {
        let came = self.within(LONG, expression).await;
        assert!(came, "never: {expression}\n{}", self.text("body").await);
    }

    /// Whether an expression is true before so much time has passed.
    async fn within(&self, limit: Duration, expression: &str) -> bool {
        let script = json!({ "script": format!("return !!({expression});"), "args": [] });
        let wait = async {
            while self.try_ask("POST", "/execute/sync", &script).await != Ok(json!(true)) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(limit, wait).await.is_ok()
    }

    /// Waits until the page says so.
    pub(crate) async fn until_shown(&self, text: &str) {
        self.until(&format!(
            "document.body.innerText.includes({})",
            json!(text)
        ))
        .await;
    }

    /// Does this to an element once it is there and takes it: a page that follows the store may
    /// change it between the search and the act, and a form may still be on its way.
    async fn act(&self, selector: &str, act: &str, body: &Value) {
        const NOT_YET: [&str; 4] = [
            "no such element",
            "stale element reference",
            "element not interactable",
            "element click intercepted",
        ];
        let search = json!({ "using": "css selector", "value": selector });
        let attempt = async || {
            let found = self.try_ask("POST", "/element", &search).await?;
            let id = found.as_object().and_then(|ids| ids.values().next());
            let id = id.and_then(Value::as_str).unwrap();
            let path = format!("/element/{id}/{act}");
            self.try_ask("POST", &path, body).await
        };
        let wait = async {
            while let Err(refused) = attempt().await {
                let why = refused["error"].as_str().unwrap_or_default();
                assert!(NOT_YET.contains(&why), "{act} {selector}: {refused}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let done = tokio::time::timeout(LONG, wait).await;
        assert!(done.is_ok(), "never: {act} {selector}");
    }

    /// A real click, where the element is. Does not wait for what comes of it.
    pub(crate) async fn click(&self, selector: &str) {
        self.act(selector, "click", &json!({})).await;
    }

    pub(crate) async fn type_into(&self, selector: &str, text: &str) {
        self.act(selector, "value", &json!({ "text": text })).await;
    }

    /// Keys that lead to another page, pressed again if the page did not get them in time: it gives
    /// whoever types them a second and a half.
    pub(crate) async fn lead(&self, keys: &str, path: &str) {
        let there = format!(
            "location.pathname === {} && document.readyState === 'complete'",
            json!(path)
        );
        for _ in 0..10 {
            self.keys(keys).await;
            if self.within(LONG / 10, &there).await {
                return;
            }
        }
        panic!("{keys} did not lead to {path}");
    }

    /// Keys for whatever has the focus.
    pub(crate) async fn keys(&self, keys: &str) {
        let strokes: Vec<Value> = keys
            .chars()
            .flat_map(|key| {
                [
                    json!({ "type": "keyDown", "value": key }),
                    json!({ "type": "keyUp", "value": key }),
                ]
            })
            .collect();
        let actions = json!({ "actions": [{ "type": "key", "id": "keys", "actions": strokes }] });
        self.ask("POST", "/actions", &actions).await;
    }

    /// What the browser complained about: refused scripts and styles, missing files, errors.
    pub(crate) async fn complaints(&self) -> Vec<String> {
        let log = self
            .ask("POST", "/se/log", &json!({ "type": "browser" }))
            .await;
        let entries = log.as_array().cloned().unwrap_or_default();
        entries
            .iter()
            .map(|entry| entry["message"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// A picture of the page as it is, as PNG.
    pub(crate) async fn picture(&self) -> Vec<u8> {
        let picture = self.ask("GET", "/screenshot", &Value::Null).await;
        unbase64(picture.as_str().unwrap())
    }

    pub(crate) async fn close(self) {
        self.ask("DELETE", "", &json!({})).await;
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn unbase64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let (mut bytes, mut bits, mut width) = (Vec::new(), 0_u32, 0);
    for c in text
        .bytes()
        .filter(|c| !c.is_ascii_whitespace() && *c != b'=')
    {
        bits = (bits << 6) | u32::from(value(c));
        width += 6;
        if width >= 8 {
            width -= 8;
            bytes.push((bits >> width) as u8);
            bits &= (1 << width) - 1;
        }
    }
    bytes
}
