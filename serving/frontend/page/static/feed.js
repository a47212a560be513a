// The server's stream: lines of JSON, and another try whenever it ends.

const LONGEST_WAIT_S = 15;
const SILENCE_S = 6; // a line is due every second

// Calls `on.open()` before the lines of a connection, `on.line(object)` for each line;
// `on.link(text, waiting)` with what a reader is to know of the connection, empty while it is well;
// `on.refused(status, text)` where a key is asked for: nothing happens then until `retry`.
export class Feed {
  #on;
  #key;
  #failures = 0;
  #wake = () => {};
  #abort = null;
  #reading = false;
  #again = false; // at once, however the reading ends

  constructor(on, key) {
    this.#on = on;
    this.#key = key; // () => the key, or ""
  }

  async run() {
    for (;;) {
      let wait = "";
      this.#reading = true;
      try {
        wait = await this.#read();
      } catch (error) {
        wait = error instanceof TypeError ? "the server does not answer" : error.message;
      }
      this.#reading = false;
      if (this.#again) this.#again = false;
      else if (wait === null) await new Promise((resolve) => (this.#wake = resolve));
      else await this.#pause(wait);
    }
  }

  retry() {
    this.#failures = 0;
    this.#again = this.#reading;
    this.#abort?.abort();
    this.#wake();
  }

  // Why the stream ended; null where a key is asked for.
  async #read() {
    this.#abort = new AbortController();
    const headers = this.#key() ? { Authorization: `Bearer ${this.#key()}` } : {};
    const answer = await fetch("api/stream", {
      headers,
      cache: "no-store",
      signal: this.#abort.signal,
    });
    if (!answer.ok) {
      const text = await answer.json().then(
        (body) => body.error,
        () => `status ${answer.status}`,
      );
      if (answer.status !== 401 && answer.status !== 403) return text;
      this.#on.link("", false);
      this.#on.refused(answer.status, text);
      return null;
    }
    this.#on.open();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const part = await this.#within(reader.read());
      if (part.done) return "the server ended the stream";
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) this.#on.line(JSON.parse(line));
      if (lines.length) {
        this.#failures = 0;
        this.#on.link("", false);
      }
    }
  }

  async #within(reading) {
    let timer;
    const silence = new Promise((_, reject) => {
      timer = setTimeout(() => {
        reject(new Error(`the server was silent for ${SILENCE_S} s`));
        this.#abort.abort();
      }, 1000 * SILENCE_S);
    });
    reading.catch(() => {}); // once it is aborted nobody waits for it
    try {
      return await Promise.race([reading, silence]);
    } finally {
      clearTimeout(timer);
    }
  }

  // Longer each time, with chance in it, so that the pages of a restarted server come one by one.
  async #pause(why) {
    const most = Math.min(LONGEST_WAIT_S, 2 ** this.#failures);
    this.#failures += 1;
    let woken = false;
    for (let left = Math.ceil(most * (0.5 + Math.random() / 2)); left > 0 && !woken; left -= 1) {
      this.#on.link(`Disconnected: ${why}. Trying again in ${left} s.`, true);
      woken = await new Promise((resolve) => {
        const timer = setTimeout(() => resolve(false), 1000);
        this.#wake = () => (clearTimeout(timer), resolve(true));
      });
    }
    this.#on.link("Connecting again …", true);
  }
}
