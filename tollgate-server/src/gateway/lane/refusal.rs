//! Requests that do not pass: told why, and counted.

use std::io;
use std::task::Context;

use tollgate::Ruling;
use tollgate::http::Message;

use super::super::exchange::Ending;
use super::super::site::Site;
use super::request::Plain;
use super::scratch::Desk;
use super::{Lane, text};

impl Lane<'_> {
    /// Tells the client why its request does not pass.
    pub(super) fn refuse(
        &mut self,
        plain: &Plain<'_>,
        ruling: &Ruling,
        mut ending: Ending,
        desk: &mut Desk,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        if let Some(message) = self.write_refusal(plain, ruling, desk) {
            ending.note_status(message.status);
            ending.note_sent(message.body_bytes);
        }
        self.put(&desk.out, &[], context)
    }

    /// The same where nobody writes it down: all that a flood leaves is numbers.
    pub(super) fn refuse_unlogged(
        &mut self,
        plain: &Plain<'_>,
        desk: &mut Desk,
        (site, route): (&Site, Option<usize>),
        ruling: &Ruling,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let tally = &self.worker.tally;
        let began = tally.now();
        self.is_last = plain.is_last;
        let status = self.write_refusal(plain, ruling, desk).map(|message| message.status);
        let put = self.put(&desk.out, &[], context);
        tally.note_ruling_after(&mut desk.last_noted, ruling);
        let nanos = tally.nanos_since(began);
        match route {
            Some(number) => {
                let route = site.routes[number].tally(self.worker.number);
                route.note_began();
                route.note_ended(status, nanos);
            }
            None => tally.note_unrouted(status, nanos),
        }
        put
    }

    fn write_refusal(&mut self, plain: &Plain<'_>, ruling: &Ruling, desk: &mut Desk) -> Option<Message> {
        self.is_last |= self.worker.is_closing();
        let Desk { out, date, .. } = desk;
        let date = date.line(self.worker.ticks.now());
        let headers = plain.headers.lines;
        let mut message = if self.is_last {
            ruling.write_message(headers, &[date, text::CLOSE].concat(), out)
        } else {
            ruling.write_message(headers, date, out)
        }?;
        if plain.is_head() {
            out.truncate(out.len() - message.body_bytes);
            message.body_bytes = 0;
        }
        Some(message)
    }
}
