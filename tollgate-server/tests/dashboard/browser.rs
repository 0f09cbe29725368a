//! A headless Chromium, driven by the Chrome DevTools Protocol over a pair of pipes.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;

use serde_json::{Value, json};
use testkit::folder::folder;
use testkit::process::ForeignServer;
use testkit::skip::skipped;
use testkit::wait::{PATIENCE, wait_until};

/// The names of Chromium in the packages of Debian, Ubuntu and Google.
const NAMES: [&str; 5] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"];

/// Chromium as root has no sandbox. Pages of other tests are in the background, and must not be slowed down.
const OPTIONS: &str = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars \
    --disable-background-networking --disable-component-update --disable-background-timer-throttling \
    --disable-backgrounding-occluded-windows --disable-renderer-backgrounding --force-color-profile=srgb";

/// A running Chromium. It ends with its last page.
struct Browser {
    commands: Mutex<(File, u64)>,
    replies: Arc<Mutex<HashMap<u64, Sender<Value>>>>,
    /// Errors that pages reported, by session.
    problems: Arc<Mutex<HashMap<String, Vec<String>>>>,
    _process: ForeignServer,
}

/// A tab with its own storage.
pub(crate) struct Page {
    browser: Arc<Browser>,
    session: String,
    context: String,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the path of Chromium, or reports that the test is skipped. With `CI=true` it must be there.
fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let found = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    let found = std::env::var_os("CHROMIUM").map(PathBuf::from).into_iter().chain(found).find(|path| path.exists());
    if found.is_none() {
        let message = "Chromium is not on the PATH: run `tools/install-browser`, or set CHROMIUM";
        let may_skip = std::env::var("CI").as_deref() != Ok("true") || tools().join("unavailable").exists();
        assert!(may_skip, "{message}");
        skipped(message);
    }
    found
}

/// Returns the folder of `tools/install-browser`.
pub(crate) fn tools() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/browser")
}

impl Browser {
    /// Returns the browser that all tests of this process share.
    fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<Browser>> = Mutex::new(Weak::new());
        let mut shared = lock(&SHARED);
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        let browser = Arc::new(Self::start(&chromium()?));
        *shared = Arc::downgrade(&browser);
        Some(browser)
    }

    /// Starts it with two named pipes as the descriptors 3 and 4.
    fn start(chromium: &Path) -> Self {
        let folder = folder();
        let (to, from) = (folder.path().join("to"), folder.path().join("from"));
        let made = Command::new("mkfifo").args([&to, &from]).status().expect("mkfifo runs");
        assert!(made.success(), "the pipes can be made");
        let mut command = Command::new("sh");
        let script = format!("exec \"$0\" {OPTIONS} --remote-debugging-pipe --user-data-dir=profile 3<to 4>from");
        command.arg("-c").arg(script).arg(chromium);
        let process = ForeignServer::spawn(command, folder).expect("sh starts");
        let commands = OpenOptions::new().write(true).open(to).expect("the pipe is there");
        let from = BufReader::new(File::open(from).expect("the pipe is there"));
        let (replies, problems) = (Arc::default(), Arc::default());
        let reader = Reader { replies: Arc::clone(&replies), problems: Arc::clone(&problems) };
        thread::spawn(move || reader.run(from));
        Self { commands: Mutex::new((commands, 0)), replies, problems, _process: process }
    }

    /// Sends a command and returns its result.
    #[track_caller]
    fn call(&self, session: Option<&str>, method: &str, parameters: Value) -> Value {
        let (sender, receiver) = channel();
        {
            let mut commands = lock(&self.commands);
            commands.1 += 1;
            let mut command = json!({ "id": commands.1, "method": method, "params": parameters });
            if let Some(session) = session {
                command["sessionId"] = session.into();
            }
            lock(&self.replies).insert(commands.1, sender);
            let sent = commands.0.write_all(format!("{command}\0").as_bytes());
            sent.unwrap_or_else(|error| panic!("{method}: the browser has ended: {error}"));
        }
        let reply = receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("the browser does not answer {method}"));
        assert!(reply["error"].is_null(), "{method}: {}", reply["error"]);
        reply["result"].clone()
    }
}

/// Receives the messages of the browser until it ends.
struct Reader {
    replies: Arc<Mutex<HashMap<u64, Sender<Value>>>>,
    problems: Arc<Mutex<HashMap<String, Vec<String>>>>,
}

impl Reader {
    fn run(&self, mut from: BufReader<File>) {
        let mut message = Vec::new();
        while from.read_until(0, &mut message).is_ok_and(|length| length > 0) {
            let value: Value =
                serde_json::from_slice(message.strip_suffix(b"\0").unwrap_or(&message)).unwrap_or_default();
            message.clear();
            match value["id"].as_u64() {
                Some(id) => {
                    // Fails if the test has stopped waiting.
                    _ = lock(&self.replies).remove(&id).map(|reply| reply.send(value));
                }
                None => self.note(&value),
            }
        }
    }

    /// Notes exceptions, and violations of the content security policy.
    fn note(&self, event: &Value) {
        let parameters = &event["params"];
        let problem = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => &parameters["exceptionDetails"],
            Some("Log.entryAdded") if parameters["entry"]["source"] == "security" => &parameters["entry"],
            _ => return,
        };
        let session = event["sessionId"].as_str().unwrap_or_default().to_owned();
        lock(&self.problems).entry(session).or_default().push(problem.to_string());
    }
}

impl Page {
    /// Opens an empty page on a screen of this size. Returns `None` if there is no browser on this machine.
    pub(crate) fn open((width, height): (u32, u32)) -> Option<Self> {
        let browser = Browser::shared()?;
        let context = browser.call(None, "Target.createBrowserContext", json!({}));
        let context = context["browserContextId"].as_str().expect("an id").to_owned();
        let target = json!({ "url": "about:blank", "browserContextId": context });
        let target = browser.call(None, "Target.createTarget", target);
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session =
            browser.call(None, "Target.attachToTarget", attach)["sessionId"].as_str().expect("an id").to_owned();
        let page = Self { browser, session, context };
        for domain in ["Page", "Runtime", "Log", "Performance"] {
            page.call(&format!("{domain}.enable"), json!({}));
        }
        page.call("Emulation.setFocusEmulationEnabled", json!({ "enabled": true }));
        let is_phone = width < 600;
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone });
        page.call("Emulation.setDeviceMetricsOverride", metrics);
        Some(page)
    }

    #[track_caller]
    pub(crate) fn call(&self, method: &str, parameters: Value) -> Value {
        self.browser.call(Some(&self.session), method, parameters)
    }

    /// Sets media features, such as `prefers-color-scheme`.
    pub(crate) fn prefer(&self, feature: &str, value: &str) {
        self.call("Emulation.setEmulatedMedia", json!({ "features": [{ "name": feature, "value": value }] }));
    }

    /// Runs a script in every document before its own scripts.
    pub(crate) fn before_load(&self, script: &str) {
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({ "source": script }));
    }

    /// Loads a page, and waits until its document is complete.
    #[track_caller]
    pub(crate) fn load(&self, url: &str) {
        let loaded = self.call("Page.navigate", json!({ "url": url }));
        assert!(loaded["errorText"].is_null(), "{url}: {}", loaded["errorText"]);
        self.until("document.readyState === 'complete'");
    }

    /// Returns the value of an expression, which may be a promise.
    #[track_caller]
    pub(crate) fn value(&self, expression: &str) -> Value {
        let wanted = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let result = self.call("Runtime.evaluate", wanted);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub(crate) fn until(&self, expression: &str) {
        let holds = wait_until(|| (self.value(expression) == json!(true)).then_some(()));
        assert!(holds.is_some(), "it does not become true: {expression}\n{}", self.shown());
    }

    /// Waits until an element shows a text.
    #[track_caller]
    pub(crate) fn until_shows(&self, selector: &str, text: &str) {
        let (found, text) = (element(selector), json!(text));
        self.until(&format!("{found}?.checkVisibility() && {found}.innerText.includes({text})"));
    }

    /// Returns the text of the first element.
    #[track_caller]
    pub(crate) fn text(&self, selector: &str) -> String {
        self.value(&format!("{}.innerText", element(selector))).as_str().unwrap_or_default().to_owned()
    }

    /// Returns everything that the page shows, for the message of a failed test.
    pub(crate) fn shown(&self) -> String {
        self.value("document.body?.innerText").as_str().unwrap_or_default().to_owned()
    }

    /// Clicks the first element.
    #[track_caller]
    pub(crate) fn click(&self, selector: &str) {
        self.value(&format!("{}.click()", element(selector)));
    }

    /// Replaces the text of a field, as typing does.
    #[track_caller]
    pub(crate) fn fill(&self, selector: &str, text: &str) {
        let (field, text) = (element(selector), json!(text));
        self.value(&format!(
            "{field}.focus(), {field}.value = {text}, \
             ['input', 'change'].forEach((name) => {field}.dispatchEvent(new Event(name, {{ bubbles: true }})))"
        ));
    }

    /// Presses a key, such as `Tab` or `Enter`.
    pub(crate) fn press(&self, key: &str) {
        let code = HashMap::from([("Tab", 9), ("Enter", 13), ("Escape", 27), ("ArrowRight", 39)])[key];
        let text = if key == "Enter" { "\r" } else { "" };
        let pressed =
            json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
        self.call("Input.dispatchKeyEvent", pressed);
        let released = json!({ "type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", released);
    }

    /// Returns a number of Chromium about the page, such as `Nodes`, after a garbage collection.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        self.call("HeapProfiler.collectGarbage", json!({}));
        let metrics = self.call("Performance.getMetrics", json!({}));
        let metrics = metrics["metrics"].as_array().expect("a list");
        metrics
            .iter()
            .find(|metric| metric["name"] == name)
            .and_then(|metric| metric["value"].as_f64())
            .expect("a number")
    }

    /// Returns a picture of the top of the page as base64 of a PNG.
    pub(crate) fn picture(&self) -> String {
        let picture = self.call("Page.captureScreenshot", json!({ "format": "png", "optimizeForSpeed": false }));
        picture["data"].as_str().expect("base64").to_owned()
    }

    /// Checks that no script has failed and that the content security policy was kept.
    #[track_caller]
    pub(crate) fn has_no_problems(&self) {
        let problems = lock(&self.browser.problems).get(&self.session).cloned().unwrap_or_default();
        assert!(problems.is_empty(), "{problems:#?}");
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // A failed test drops it too, where a second panic would hide the first.
        if !thread::panicking() {
            self.browser.call(None, "Target.disposeBrowserContext", json!({ "browserContextId": self.context }));
        }
    }
}

fn element(selector: &str) -> String {
    format!("document.querySelector({})", json!(selector))
}
