// Real typing in a real Chromium: what leaves the page, and when. `node scenarios.mjs` prints a line of JSON a scenario.
// CHROMIUM: the program. REAL: JSON of a running gateway's url, and of two origins' tokens for it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { ATTACH, CLOCK, page, Shared, TYPED, World } from "./harness.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const fromSdk = createRequire(join(here, "../../web-sdk/package.json"));
const { chromium } = fromSdk("playwright-core");

const scenarios = new Map();
const scenario = (name, run) => scenarios.set(name, run);

scenario("the first key hints at once, and then one key in four seconds does", async (w) => {
  const tab = await w.open();
  await tab.focus("#prompt");
  await tab.keyboard.type(TYPED + " one two three");
  await w.gateway.hears("advisory chat-1");
  const [first] = w.gateway.seen;
  assert.deepEqual(first.body, { session_id: "chat-1", token: "t1", ttl_s: 6 });
  assert.match(first.headers["content-type"], /^text\/plain/);
  await w.pass(tab, 3900);
  await tab.keyboard.type("more");
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
  await w.pass(tab, 200);
  await tab.keyboard.type("and more");
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
  await w.pass(tab, 60_000);
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
});

scenario("keys that write nothing, and fields that are not watched, say nothing", async (w) => {
  const tab = await w.open();
  await tab.focus("#prompt");
  for (const key of ["Shift", "Control", "ArrowLeft", "Escape", "Control+C", "Tab"]) await tab.keyboard.press(key);
  await tab.focus("#other");
  await tab.keyboard.type(TYPED);
  await w.settle(tab);
  await w.gateway.hears();
});

scenario("focus counts when it is asked for", async (w) => {
  const tab = await w.open(page(`upbeat.attach("#prompt", { session: "chat-1", focus: true });`));
  await tab.focus("#prompt");
  await w.gateway.hears("advisory chat-1");
  assert.deepEqual(w.gateway.seen[0].body, { session_id: "chat-1", ttl_s: 6 });
});

scenario("an input method's first sign of a composition hints", async (w) => {
  const tab = await w.open();
  await tab.focus("#prompt");
  const cdp = await w.context.newCDPSession(tab);
  await cdp.send("Input.imeSetComposition", { text: TYPED + "に", selectionStart: 6, selectionEnd: 6 });
  await w.gateway.hears("advisory chat-1");
  await cdp.send("Input.insertText", { text: TYPED + "日本" });
  assert.match(await tab.inputValue("#prompt"), /日本/);
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
});

scenario("a paste hints, also where the page inserts it itself", async (w) => {
  const own = `document.querySelector("#prompt").addEventListener("paste", (e) => { e.preventDefault(); });`;
  for (const script of [ATTACH, ATTACH + own]) {
    const tab = await w.open(page(script, `<textarea id="prompt"></textarea>`));
    await tab.fill("#other", TYPED + " pasted");
    await tab.focus("#other");
    await tab.keyboard.press("Control+A");
    await tab.keyboard.press("Control+C");
    await tab.focus("#prompt");
    await w.settle(tab);
    w.gateway.seen = [];
    await tab.keyboard.press("Control+V");
    await w.gateway.hears("advisory chat-1");
    assert.equal(await tab.inputValue("#prompt"), script == ATTACH ? TYPED + " pasted" : "");
  }
});

scenario("dictated text hints, and a page's own voice button can", async (w) => {
  const tab = await w.open(page(`window.handle = ${ATTACH}`));
  await tab.focus("#prompt");
  await tab.keyboard.insertText(" spoken");
  await w.gateway.hears("advisory chat-1");
  await w.pass(tab, 5000);
  await tab.evaluate(() => void window.handle.advise());
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
});

scenario("closing the tab withdraws the hint", async (w) => {
  const tab = await w.open(undefined, { fresh: true });
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.close({ runBeforeUnload: true });
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  assert.deepEqual(w.gateway.seen[1].body, { session_id: "chat-1", token: "t1" });
  assert.match(w.gateway.seen[1].headers["content-type"], /^text\/plain/);
});

scenario("leaving the page withdraws the hint, unless it does not count any more", async (w) => {
  const tab = await w.open();
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.goto("about:blank");
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  const late = await w.open();
  await w.key(late);
  await w.gateway.hears("advisory chat-1", "invalidate chat-1", "advisory chat-1");
  await w.pass(late, 6001);
  await late.goto(w.host.url + "/elsewhere");
  await w.settle(late);
  await w.gateway.hears("advisory chat-1", "invalidate chat-1", "advisory chat-1");
});

scenario("where requests cannot outlive the page, a beacon withdraws", async (w) => {
  const tab = await w.open(page(ATTACH, undefined, "delete Request.prototype.keepalive;"));
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.goto("about:blank");
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  assert.equal(w.gateway.seen[1].headers["sec-fetch-mode"], "no-cors");
  assert.match(w.gateway.seen[1].headers["content-type"], /^text\/plain/);
});

scenario("another window in front changes nothing, and typing goes on after it", async (w) => {
  const tab = await w.open(undefined, { fresh: true });
  const cdp = await w.context.newCDPSession(tab);
  await cdp.send("Emulation.setFocusEmulationEnabled", { enabled: false });
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  const front = await w.context.newPage();
  await front.bringToFront();
  assert.equal(await tab.evaluate(() => document.hasFocus()), false);
  // A headless window is never covered, so that it is hidden is only said.
  await tab.evaluate(() => {
    Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
    Object.defineProperty(document, "hidden", { value: true, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await w.pass(tab, 5000);
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
  await front.close();
  await tab.bringToFront();
  await tab.evaluate(() => {
    delete document.visibilityState;
    delete document.hidden;
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
  await w.key(tab);
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
});

scenario("a field that is rendered again and again is watched all the time", async (w) => {
  const tab = await w.open(page(ATTACH, ""));
  for (let turn = 0; turn < 4; turn++) {
    await tab.evaluate(() => (document.querySelector("#app").innerHTML = `<form><textarea id="prompt"></textarea></form>`));
    await w.key(tab);
    await w.pass(tab, 4001);
  }
  await w.gateway.hears(...Array(4).fill("advisory chat-1"));
});

scenario("a route that is left withdraws, and one that is only rewritten does not", async (w) => {
  const tab = await w.open();
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.evaluate(() => history.replaceState({}, "", "/?rewritten"));
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.evaluate(() => history.pushState({}, "", "/settings"));
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  await w.pass(tab, 4001);
  await w.key(tab);
  await w.gateway.hears("advisory chat-1", "invalidate chat-1", "advisory chat-1");
  await tab.evaluate(() => history.back());
  await w.gateway.hears("advisory chat-1", "invalidate chat-1", "advisory chat-1", "invalidate chat-1");
});

scenario("another conversation in the same field withdraws the one before and asks for its own token", async (w) => {
  const tab = await w.open(
    page(`window.chat = "a"; window.asked = [];
      upbeat.attach("#prompt", { session: () => chat, token: async (id) => { asked.push(id); return "for-" + id; } });`),
  );
  await w.key(tab);
  await w.gateway.hears("advisory a");
  await tab.evaluate(() => (window.chat = "b"));
  await w.key(tab);
  await w.gateway.hears("advisory a", "invalidate a", "advisory b");
  assert.deepEqual(w.gateway.seen.map((one) => one.body.token), ["for-a", "for-a", "for-b"]);
  assert.deepEqual(await tab.evaluate(() => window.asked), ["a", "b"]);
  await tab.evaluate(() => (window.chat = null));
  await w.key(tab);
  await w.gateway.hears("advisory a", "invalidate a", "advisory b", "invalidate b");
});

scenario("a new chat's provisional id gives way to its real one", async (w) => {
  const tab = await w.open(page(`upbeat.attach("#prompt", { session: "new-1", token: "t1" });`));
  await w.key(tab);
  await w.gateway.hears("advisory new-1");
  await tab.evaluate(() => upbeat.bind("new-1", "chat-9"));
  await w.settle(tab);
  await w.gateway.hears("advisory new-1");
  await w.key(tab);
  await w.gateway.hears("advisory new-1", "invalidate new-1", "advisory chat-9");
  await w.pass(tab, 4001);
  await w.key(tab);
  await tab.goto("about:blank");
  await w.gateway.hears("advisory new-1", "invalidate new-1", "advisory chat-9", "advisory chat-9", "invalidate chat-9");
});

scenario("two tabs speak for themselves", async (w) => {
  const [one, two] = [await w.open(undefined, { fresh: true }), await w.open()];
  await w.key(one);
  await w.gateway.hears("advisory chat-1");
  await w.key(two);
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
  await one.close({ runBeforeUnload: true });
  await w.gateway.hears("advisory chat-1", "advisory chat-1", "invalidate chat-1");
  await w.pass(two, 4001);
  await w.key(two);
  await w.gateway.hears("advisory chat-1", "advisory chat-1", "invalidate chat-1", "advisory chat-1");
});

scenario("a tab that only looks on withdraws nothing", async (w) => {
  const tab = await w.open(undefined, { fresh: true });
  await tab.focus("#prompt");
  await tab.close({ runBeforeUnload: true });
  const other = await w.open();
  await w.settle(other);
  await w.gateway.hears();
});

scenario("a token that has expired is fetched anew, once, and the hint still goes", async (w) => {
  w.gateway.answer = (one) => (one.body.token == "t1" ? [401, {}] : [202, {}]);
  const tab = await w.open(page(`let n = 0; upbeat.attach("#prompt", { session: "chat-1", token: async () => "t" + ++n });`));
  await w.key(tab);
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
  assert.deepEqual(w.gateway.seen.map((one) => one.body.token), ["t1", "t2"]);
  await w.pass(tab, 4001);
  await w.key(tab);
  await w.gateway.hears(...Array(3).fill("advisory chat-1"));
  assert.equal(w.gateway.seen[2].body.token, "t2");
});

scenario("a token that is refused again and again does not make a storm", async (w) => {
  w.gateway.answer = () => [401, {}];
  const tab = await w.open(page(`window.n = 0; upbeat.attach("#prompt", { session: "chat-1", token: () => "t" + ++n });`));
  const hints = await w.keys(tab, 60);
  // At 0 s, 8 s, 24 s and 56 s, each with one more try; a little later where an answer came late.
  assert.ok(hints >= 6 && hints <= 8, `${hints} hints`);
});

scenario("the token is fetched when the field gets the focus, so that the first key waits for nothing", async (w) => {
  const tab = await w.open(page(`window.asked = 0; upbeat.attach("#prompt", { session: "chat-1", token: async () => "t" + ++asked });`));
  await tab.focus("#prompt");
  assert.equal(await tab.evaluate(() => window.asked), 1);
  await tab.keyboard.type(TYPED);
  await w.gateway.hears("advisory chat-1");
  assert.equal(await tab.evaluate(() => window.asked), 1);
});

scenario("a token that cannot be had is asked for again, later", async (w) => {
  const tab = await w.open(
    page(`window.asked = 0; upbeat.attach("#prompt", { session: "chat-1", token: async () => { if (++asked < 3) throw Error("no"); return "t"; } });`),
  );
  await w.key(tab);
  await w.settle(tab);
  await w.gateway.hears();
  await w.pass(tab, 8001);
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
});

scenario("a page whose policy lets it connect to the gateway only needs nothing else", async (w) => {
  const policy = `default-src 'none'; img-src data:; script-src 'self' 'unsafe-inline' GATEWAY; connect-src GATEWAY`.replaceAll("GATEWAY", w.gateway.url);
  const violations = `document.addEventListener("securitypolicyviolation", (e) => (window.violated = e.violatedDirective));`;
  const tab = await w.open(page(violations + ATTACH), { headers: { "Content-Security-Policy": policy } });
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.evaluate(() => history.pushState({}, "", "/elsewhere"));
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  assert.equal(await tab.evaluate(() => window.violated), undefined);
});

scenario("a page whose policy forbids it is not disturbed", async (w) => {
  const policy = `default-src 'none'; script-src 'unsafe-inline' GATEWAY; connect-src 'none'`.replaceAll("GATEWAY", w.gateway.url);
  const tab = await w.open(page(ATTACH), { headers: { "Content-Security-Policy": policy } });
  await w.key(tab);
  await tab.goto("about:blank");
  await w.gateway.hears();
});

scenario("429 is obeyed, for as long as it says", async (w) => {
  w.gateway.answer = () => [429, { "Retry-After": "20" }];
  const tab = await w.open();
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await w.settle(tab);
  w.gateway.answer = () => [202, {}];
  await w.pass(tab, 19_000);
  await w.key(tab);
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1");
  await w.pass(tab, 1001);
  await w.key(tab);
  await w.gateway.hears("advisory chat-1", "advisory chat-1");
  await w.settle(tab);
  await w.pass(tab, 4001);
  await w.key(tab);
  await w.gateway.hears(...Array(3).fill("advisory chat-1"));
});

scenario("a gateway that fails is asked less and less often", async (w) => {
  w.gateway.answer = () => [503, {}];
  const tab = await w.open();
  const hints = await w.keys(tab, 130);
  // At 0 s, and after 8, 16, 32 and 64 s more: 8, 24, 56, 120; a little later where an answer came late.
  assert.ok(hints >= 4 && hints <= 5, `${hints} hints`);
});

scenario("a browser that was offline hints at once when it is online again", async (w) => {
  const tab = await w.open();
  await w.context.setOffline(true);
  for (let turn = 0; turn < 3; turn++) {
    await w.key(tab);
    await w.settle(tab); // a hint that fails only once it is online again would still be waited after
    await w.pass(tab, 4001);
  }
  await w.gateway.hears();
  await w.context.setOffline(false);
  // The page may know it before the browser's network does.
  await tab.waitForFunction(() => navigator.onLine && fetch(location.href).then(Boolean, () => false));
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
});

scenario("a rich text editor is watched as a field is", async (w) => {
  const tab = await w.open(page(ATTACH, `<div id="prompt" contenteditable="true"><p>Old <b>text</b></p></div>`));
  await tab.click("#prompt b");
  await tab.keyboard.type(TYPED);
  await w.gateway.hears("advisory chat-1");
  assert.match(await tab.textContent("#prompt"), new RegExp(TYPED));
});

scenario("a field may be named by what is around it, and may be in a shadow tree, an input, or an element", async (w) => {
  const inside = `<chat-box></chat-box><script>
    customElements.define("chat-box", class extends HTMLElement {
      connectedCallback() { this.attachShadow({ mode: "open" }).innerHTML = "<form><input id=deep></form>"; } });</script>`;
  for (const target of [`"chat-box"`, `"#deep"`, `document.querySelector("chat-box")`, `() => document.querySelector("chat-box").shadowRoot.firstChild`]) {
    const tab = await w.open(page(`upbeat.attach(${target}, { session: "chat-1", token: "t1" });`, inside));
    await w.settle(tab);
    w.gateway.seen = [];
    await w.key(tab, "#deep");
    await w.gateway.hears("advisory chat-1");
  }
});

scenario("what is typed leaves in no header either", async (w) => {
  // The page keeps the draft in its own address, and the gateway is the page's own origin.
  const tab = await w.open(page(`upbeat.attach("#prompt", { session: "chat-1", token: "t1", url: "" });
    document.querySelector("#prompt").addEventListener("input", (e) => history.replaceState({}, "", "?draft=" + e.target.value));`));
  const sent = [];
  tab.on("request", (request) => sent.push(request));
  await w.key(tab);
  await w.pass(tab, 4001);
  await w.key(tab);
  await tab.evaluate(() => history.pushState({}, "", "/other"));
  await w.settle(tab);
  const ours = sent.filter((request) => request.url().includes("/v1/"));
  assert.deepEqual(ours.map((request) => new URL(request.url()).pathname), ["/v1/advisory", "/v1/advisory", "/v1/invalidate"]);
  for (const request of ours) assert.ok(!JSON.stringify([request.url(), await request.allHeaders(), request.postData()]).includes(TYPED));
});

scenario("a hostile page is not disturbed, whatever it has broken", async (w) => {
  const evil = `() => { throw Error("hostile"); }`;
  const broken = {
    "fetch throws": `window.fetch = ${evil};`,
    "fetch answers nonsense": `window.fetch = () => 5;`,
    "fetch never answers": `window.fetch = () => new Promise(() => {});`,
    "fetch rejects with nothing": `window.fetch = () => Promise.reject();`,
    "fetch is no function": `window.fetch = null;`,
    "a beacon throws": `delete Request.prototype.keepalive; navigator.sendBeacon = ${evil};`,
    "JSON throws": `JSON.stringify = ${evil};`,
    "no JSON": `window.JSON = undefined;`,
    "every object has headers": `Object.prototype.headers = { "x-evil": "zebra" }; Object.prototype.body = "zebra"; Object.prototype.mode = "no-cors";`,
    "every object writes itself": `Object.prototype.toJSON = ${evil};`,
    "arrays are broken": `Array.prototype.some = Array.prototype.map = ${evil};`,
    "no controllers": `window.AbortController = undefined;`,
    "maps are broken": `Map.prototype.get = ${evil};`,
    "no clock": `Object.defineProperty(window, "performance", { value: {} });`,
    "matching throws": `Element.prototype.matches = ${evil};`,
    "paths throw": `Event.prototype.composedPath = ${evil};`,
    "promises are broken": `Promise.prototype.catch = Promise.prototype.then = ${evil};`,
    "nothing can be listened to": `window.addEventListener = ${evil};`,
  };
  const html = `window.handle = upbeat.attach("#prompt", { session: "chat-1", token: async () => "t1" }); window.went = "on";`;
  for (const [name, before] of Object.entries(broken)) {
    const tab = await w.open(page(html, `<input id="prompt">`, before));
    await w.key(tab);
    // Not by evaluating: what evaluates needs what is broken.
    const said = await tab.evaluate(`handle.advise(); history.pushState({}, "", "/elsewhere"); handle.detach(); document.querySelector("#prompt").value + went`);
    assert.equal(said, "zon", name);
    assert.deepEqual(w.errors, [], name);
  }
  await w.shared.tab.goto("about:blank");
});

scenario("what cannot work throws nothing: no options, no selector, a session that throws", async (w) => {
  const tab = await w.open(page(`
    upbeat.attach("#prompt"); upbeat.attach("]]", { session: "a" }); upbeat.attach(null, { session: "a" });
    upbeat.attach("#prompt", { session: () => { throw Error("host"); } });
    upbeat.attach("#prompt", { session: "chat-1", token: () => { throw Error("host"); } });
    upbeat.attach(() => { throw Error("host"); }, { session: "a" }); window.went = "on";`));
  await w.key(tab);
  await tab.goto("about:blank");
  await w.gateway.hears();
});

scenario("after detaching nothing is watched any more", async (w) => {
  const tab = await w.open(page(`window.handle = ${ATTACH}`));
  await w.key(tab);
  await w.gateway.hears("advisory chat-1");
  await tab.evaluate(() => void window.handle.detach());
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
  await w.pass(tab, 5000);
  await w.key(tab);
  await tab.evaluate(() => history.pushState({}, "", "/elsewhere"));
  await w.settle(tab);
  await w.gateway.hears("advisory chat-1", "invalidate chat-1");
});

scenario("the module speaks to the page's own origin or to the gateway that it is told", async (w) => {
  const tab = await w.open(`<!doctype html><link rel="icon" href="data:,"><textarea id="prompt"></textarea><script type="module">
    import { attach } from "/upbeat.mjs";
    attach("#prompt", { session: "chat-1" }); attach("#prompt", { session: "chat-2", url: "GATEWAY" }); window.ready = true;</script>`);
  await tab.waitForFunction(() => window.ready);
  await w.key(tab);
  await w.gateway.hears("advisory chat-2");
  await w.settle(tab);
  assert.equal(w.host.seen.filter((one) => one.url == "/v1/advisory").length, 1);
});

scenario("the React hook follows its component", async (w) => {
  const { buildSync } = fromSdk("esbuild");
  const built = buildSync({
    stdin: { contents: REACT_APP, loader: "jsx", resolveDir: join(here, "../../web-sdk") },
    bundle: true, write: false, format: "iife", jsx: "automatic", define: { "process.env.NODE_ENV": '"development"' },
  });
  w.host.files["app.js"] = built.outputFiles[0].text.replaceAll("GATEWAY", w.gateway.url);
  const tab = await w.open(`<!doctype html><link rel="icon" href="data:,"><div id="root"></div><script src="/app.js"></script>`);
  await w.key(tab);
  await w.gateway.hears("advisory a");
  assert.equal(w.gateway.seen[0].body.token, "for-a");
  await tab.keyboard.type(TYPED);
  assert.equal(await tab.inputValue("#prompt"), [...TYPED].reverse().join("") + "z", "every key makes a new field, with the caret at its beginning");
  await tab.click("#switch");
  await w.gateway.hears("advisory a", "invalidate a");
  await w.key(tab);
  await w.gateway.hears("advisory a", "invalidate a", "advisory b");
  await tab.click("#unmount");
  await w.gateway.hears("advisory a", "invalidate a", "advisory b", "invalidate b");
});

const REACT_APP = `
  import { StrictMode, useState } from "react";
  import { createRoot } from "react-dom/client";
  import { useUpbeat } from "upbeat-web/react";
  function Chat({ id }) {
    const [text, setText] = useState("");
    const ref = useUpbeat({ session: id, token: async (session) => "for-" + session, url: "GATEWAY" });
    return <><textarea id="prompt" key={text.length} autoFocus ref={ref} value={text} onChange={(e) => setText(e.target.value)} /></>;
  }
  function App() {
    const [id, setId] = useState("a");
    return <><button id="switch" onClick={() => setId("b")} /><button id="unmount" onClick={() => setId("")} />{id && <Chat id={id} />}</>;
  }
  createRoot(document.getElementById("root")).render(<StrictMode><App /></StrictMode>);
`;

scenario("a real gateway takes a page's token, loads into it with its hash, and refuses another session's", async (w) => {
  const { url, token, integrity } = w.real;
  const html = `<!doctype html><link rel="icon" href="data:,"><textarea id="prompt"></textarea><textarea id="foreign"></textarea>
    <script src="${url}/upbeat.js" integrity="${integrity}" crossorigin></script>
    <script>upbeat.attach("#prompt", { session: "real-1", token: "${token}" }); upbeat.attach("#foreign", { session: "real-2", token: "${token}" });</script>`;
  const tab = await w.open(html);
  const answers = [];
  tab.on("response", (response) => response.url().includes("/v1/") && answers.push(response.request().method() + " " + response.status()));
  const answered = (path) => tab.waitForResponse((response) => response.url() == url + path);
  let answer = answered("/v1/advisory");
  await w.key(tab);
  assert.equal((await answer).status(), 202);
  answer = answered("/v1/advisory");
  await w.key(tab, "#foreign");
  assert.equal((await answer).status(), 403);
  answer = answered("/v1/invalidate");
  await tab.evaluate(() => history.pushState({}, "", "/elsewhere"));
  assert.equal((await answer).status(), 202);
  assert.deepEqual(answers, ["POST 202", "POST 403", "POST 202"]);
});

const wanted = process.argv.slice(2);
const shared = new Shared();
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
try {
  await shared.start(browser);
  for (const [name, run] of scenarios) {
    if (!process.env.REAL && name.startsWith("a real gateway")) continue;
    if (wanted.length && !wanted.some((part) => name.includes(part))) continue;
    const w = new World(shared, JSON.parse(process.env.REAL ?? "{}"));
    const began = Date.now();
    let error = null;
    for (const step of [() => w.start(), () => run(w), () => w.stop()]) await step().catch((e) => (error ??= e.stack ?? String(e)));
    console.log(JSON.stringify({ name, error, ms: Date.now() - began }));
  }
} finally {
  await browser.close();
}
