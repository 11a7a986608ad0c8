// What a scenario is given: a host page and a gateway on two origins, both recorded, and a browser that is shared by all.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const DIST = join(dirname(fileURLToPath(import.meta.url)), "../../web-sdk/dist");
const FILES = Object.fromEntries(["upbeat.js", "upbeat.mjs", "react.mjs"].map((name) => [name, readFileSync(join(DIST, name), "utf8")]));

/** What scenarios type begins so; it must never be seen in any request. */
export const TYPED = "zebra";

const listen = (answer) =>
  new Promise((done) => {
    const server = createServer(answer);
    server.listen(0, "127.0.0.1", () => done({ server, url: `http://127.0.0.1:${server.address().port}` }));
  });

/** A gateway that records what it is told, and answers as `answer` says. */
export class Gateway {
  seen = [];
  /** (request) -> [status, headers]; */
  answer = () => [202, {}];
  #waiting = [];

  async start() {
    Object.assign(
      this,
      await listen((request, response) => {
        const pieces = [];
        request.on("data", (piece) => pieces.push(piece));
        request.on("end", () => {
          const path = request.url.split("?")[0];
          if (FILES[path.slice(1)]) {
            response.writeHead(200, { "Content-Type": "text/javascript", "Access-Control-Allow-Origin": "*" });
            return response.end(FILES[path.slice(1)]);
          }
          const one = { method: request.method, path, url: request.url, headers: request.headers, text: Buffer.concat(pieces).toString() };
          one.body = one.text.startsWith("{") ? JSON.parse(one.text) : null;
          this.seen.push(one);
          const [status, headers] = this.answer(one);
          if (status) {
            response.writeHead(status, { "Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "Retry-After", ...headers });
            response.end("{}");
          } else request.socket.destroy();
          for (const wake of this.#waiting.splice(0)) wake();
        });
      }),
    );
    return this;
  }

  /** What was told so far: "advisory chat-1", "invalidate chat-1". */
  get told() {
    return this.seen.map((one) => `${one.method == "POST" ? "" : one.method + " "}${one.path.slice(4)} ${one.body?.session_id}`);
  }

  /** Wait until exactly this was told. */
  async hears(...expected) {
    const ends = Date.now() + 5000;
    while (this.seen.length < expected.length && Date.now() < ends)
      await new Promise((wake) => {
        this.#waiting.push(wake);
        setTimeout(wake, 100);
      });
    assert.deepEqual(this.told, expected);
  }

  stop() {
    this.server.closeAllConnections();
    this.server.close();
  }
}

/** The host: its page is whatever the scenario says. */
export class Host {
  seen = [];
  html = "";
  headers = {};
  files = {};

  async start() {
    Object.assign(
      this,
      await listen((request, response) => {
        this.seen.push({ url: request.url, headers: request.headers });
        const name = request.url.slice(1);
        if (this.files[name] ?? FILES[name]) {
          response.writeHead(200, { "Content-Type": "text/javascript", "Access-Control-Allow-Origin": "*" });
          return response.end(this.files[name] ?? FILES[name]);
        }
        response.writeHead(200, { "Content-Type": "text/html; charset=utf-8", "Set-Cookie": "host=secret; Path=/", ...this.headers });
        response.end(this.html);
      }),
    );
    return this;
  }

  stop() {
    this.server.closeAllConnections();
    this.server.close();
  }
}

/** The page of most scenarios: a field with a draft in it, and the integration as the documents have it. */
export const page = (script, field = `<textarea id="prompt">${TYPED} draft</textarea>`, before = "") =>
  `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>host</title><script>${CLOCK}${before}</script>` +
  `<div id="app">${field}</div><input id="other"><script src="GATEWAY/upbeat.js"></script><script>${script}</script>`;

export const ATTACH = `upbeat.attach("#prompt", { session: "chat-1", token: "t1" });`;

/** Time in the page stands still until a scenario lets it pass. */
export const CLOCK = `{ let now = 6e4; performance.now = () => now; window.pass = (ms) => { now += ms; }; }`;

/** The browser, and the one tab that most scenarios use after each other. */
export class Shared {
  errors = [];

  async start(browser) {
    this.context = await browser.newContext();
    this.context.on("weberror", (error) => this.errors.push(String(error.error())));
    await this.context.addInitScript(() => addEventListener("unhandledrejection", (event) => { throw event.reason ?? Error("rejected"); }));
    this.tab = await this.context.newPage();
  }
}

/** One scenario's world. */
export class World {
  constructor(shared, real) {
    this.shared = shared;
    this.context = shared.context;
    this.errors = shared.errors = [];
    this.real = real;
    this.taken = false;
    this.opened = [];
  }

  async start() {
    this.gateway = await new Gateway().start();
    this.host = await new Host().start();
  }

  /** A tab with the host's page; fresh: one that may be closed. */
  async open(html = page(ATTACH), { headers = {}, fresh = false } = {}) {
    this.host.html = html.replaceAll("GATEWAY", this.gateway.url);
    this.host.headers = headers;
    let tab = this.shared.tab;
    if (fresh) this.opened.push((tab = await this.context.newPage()));
    await tab.goto(this.host.url);
    return tab;
  }

  /** A key in the field. */
  async key(tab, field = "#prompt") {
    await tab.focus(field);
    await tab.keyboard.press("z");
  }

  /** Let time pass in the page. */
  async pass(tab, ms) {
    await tab.evaluate((ms) => window.pass(ms), ms);
  }

  /** Everything that the tab was about to send has been sent: requests that came later have been answered, or failed. */
  async settle(tab) {
    await tab.evaluate(SETTLE, this.gateway.url);
    this.forget();
  }

  forget() {
    this.gateway.seen = this.gateway.seen.filter((one) => one.path != "/settled");
  }

  /** Keys for so long, one every two seconds; returns how many hints were seen. */
  async keys(tab, seconds) {
    await tab.evaluate(
      async ([url, seconds]) => {
        for (let at = 0; at < seconds; at += 2) {
          document.querySelector("#prompt").dispatchEvent(new InputEvent("input", { bubbles: true, composed: true, data: "zebra" }));
          for (let twice = 0; twice < 2; twice++) await fetch(url + "/settled", { mode: "no-cors" });
          window.pass(2000);
        }
      },
      [this.gateway.url, seconds],
    );
    this.forget();
    return this.gateway.seen.length;
  }

  async stop() {
    await this.context.setOffline(false);
    for (const tab of this.opened) await tab.close();
    this.gateway.stop();
    this.host.stop();
    // Whatever the scenario was about: nobody was disturbed, and nothing that was typed left.
    assert.deepEqual(this.errors, []);
    for (const one of [...this.gateway.seen, ...this.host.seen]) assert.ok(!JSON.stringify(one).includes(TYPED), `typed text left: ${JSON.stringify(one)}`);
    for (const one of this.gateway.seen) {
      assert.notEqual(one.method, "OPTIONS", "a preflight");
      // A beacon has the browser's own idea of both.
      if (one.headers["sec-fetch-mode"] != "no-cors") assert.deepEqual([one.headers.cookie, one.headers.referer], [undefined, undefined]);
      const known = one.path == "/v1/advisory" ? ["session_id", "token", "ttl_s"] : ["session_id", "token"];
      assert.deepEqual(Object.keys(one.body).filter((name) => !known.includes(name)), []);
    }
  }
}

const SETTLE = async (url) => {
  for (let twice = 0; twice < 2; twice++) await fetch(url + "/settled", { mode: "no-cors" }).catch(() => {});
};
