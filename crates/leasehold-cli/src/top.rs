//! `leasehold top`: leases, queues and the ratio, live.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use super::top_view::{Snapshot, Top};
use super::{Cli, Done, Trouble, out, stats};
use leasehold::Client;
use leasehold::hooks::monotonic;
use leasehold::inspect::{LeaseFilter, Page};
use leasehold::job::QueueName;
use leasehold::limits;

/// Shows the live leases with the time they have left, the queues, and released against expired.
///
/// Keys: q quits, space holds the picture, the arrows and the page keys move through the leases.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Ask the store every so many seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = stats::interval)]
    every: Duration,

    /// Leases of this queue
    #[arg(long)]
    queue: Option<QueueName>,

    /// Leases held by this worker
    #[arg(long)]
    owner: Option<String>,

    /// Leases for this run
    #[arg(long)]
    task: Option<String>,
}

/// Between two pictures: the time left is shown in tenths where it is short.
const FRAME: Duration = Duration::from_millis(200);

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    let filter = LeaseFilter {
        queue: args.queue.clone(),
        owner: args.owner.as_deref().map(Into::into),
        task: args.task.as_deref().map(Into::into),
    };
    let first = snapshot(&client, &filter).await?;
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        let why = "top needs a terminal; stats --watch does not";
        return Err(Trouble::Usage(why.to_owned()));
    }
    let mut top = Top::new(client.store().name(), first);
    let stop = stop_signal()?;
    let mut stop = std::pin::pin!(stop);
    let mut news = ask(client, filter, args.every);
    let mut keys = keys();
    let mut screen = Screen::open()?;
    loop {
        screen.0.draw(|frame| top.draw(frame, monotonic()))?;
        tokio::select! {
            key = keys.recv() => if let Some(Press::Quit) = key.map(|event| press(&mut top, &event)) {
                return Ok(());
            },
            got = news.recv() => match got {
                Some(Ok(snapshot)) => top.see(snapshot),
                Some(Err(error)) => top.fail(&out::without_secrets(&out::one_line(&error.to_string()))),
                None => return Ok(()),
            },
            () = tokio::time::sleep(FRAME) => {}
            () = stop.as_mut() => return Ok(()),
        }
    }
}

/// The terminal, given back however the command ends: when this is dropped, and by a hook that
/// `ratatui` sets before a panic is printed.
struct Screen(DefaultTerminal);

impl Screen {
    fn open() -> Result<Self, Trouble> {
        Ok(Self(ratatui::try_init()?))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

#[cfg(unix)]
fn stop_signal() -> Result<impl Future<Output = ()>, Trouble> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> Result<impl Future<Output = ()>, Trouble> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}

/// Asks the store again and again, beside the picture: a slow answer must not hold the keys up.
fn ask(
    client: Client,
    filter: LeaseFilter,
    every: Duration,
) -> mpsc::Receiver<leasehold::Result<Snapshot>> {
    let (tell, told) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(every).await;
            if tell.send(snapshot(&client, &filter).await).await.is_err() {
                return;
            }
        }
    });
    told
}

async fn snapshot(client: &Client, filter: &LeaseFilter) -> leasehold::Result<Snapshot> {
    let asked = monotonic();
    let queues = client.queues().await?;
    let page = Page::first(limits::PAGE_ROWS);
    let leases = client.leases(filter.clone(), page).await?;
    Ok(Snapshot {
        at: asked,
        queues,
        leases: leases.rows,
        more: leases.next.is_some(),
    })
}

/// What is pressed, read on a thread of its own: reading a terminal blocks.
fn keys() -> mpsc::UnboundedReceiver<Event> {
    let (tell, told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if tell.send(event).is_err() {
                return;
            }
        }
    });
    told
}

enum Press {
    Quit,
    Stay,
}

fn press(top: &mut Top, event: &Event) -> Press {
    let Event::Key(key) = event else {
        return Press::Stay;
    };
    if key.kind != KeyEventKind::Press {
        return Press::Stay;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => return Press::Quit,
        KeyCode::Char('q') | KeyCode::Esc => return Press::Quit,
        KeyCode::Char(' ') => top.hold(),
        KeyCode::Down | KeyCode::Char('j') => top.scroll(1),
        KeyCode::Up | KeyCode::Char('k') => top.scroll(-1),
        KeyCode::PageDown => top.scroll(10),
        KeyCode::PageUp => top.scroll(-10),
        KeyCode::Home => top.scroll(isize::MIN),
        _ => {}
    }
    Press::Stay
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::process::Command;

    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::Screen;

    const CHILD: &str = "LEASEHOLD_TEST_PANIC_ON_SCREEN";

    /// The other half of the next test, which runs it in a process of its own, on a terminal.
    #[test]
    fn child_that_panics_with_the_screen_open() {
        if std::env::var_os(CHILD).is_some() {
            let _screen = Screen::open().unwrap();
            panic!("on purpose");
        }
    }

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_is_printed() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = || rustix::fs::open(&name, flags, Mode::empty()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let only = "top::tests::child_that_panics_with_the_screen_open";
        command.args(["--exact", only, "--nocapture"]);
        command.env(CHILD, "1").env("TERM", "xterm-256color");
        command.stdin(open()).stdout(open()).stderr(open());
        let kept = open();
        let mut child = command.spawn().unwrap();
        drop(command);
        let mut screen = File::from(master);
        let reader = std::thread::spawn(move || {
            let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
            while let Ok(read @ 1..) = screen.read(&mut buffer) {
                seen.extend_from_slice(&buffer[..read]);
            }
            String::from_utf8_lossy(&seen).into_owned()
        });
        assert!(!child.wait().unwrap().success());
        let modes = tcgetattr(&kept).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO));
        drop(kept);
        let text = reader.join().unwrap();
        let at = |part: &str| {
            text.find(part)
                .unwrap_or_else(|| panic!("{part:?} in {text:?}"))
        };
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l"), "{text:?}");
        assert!(at("\x1b[?1049l") < at("on purpose"), "{text:?}");
    }
}
