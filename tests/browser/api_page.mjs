// The API's page in a real Chromium. `node api_page.mjs` runs the scenarios and prints a line of JSON for each.
// CHROMIUM: the program. URL: a gateway's. KEY: a key of it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const { chromium } = createRequire(join(here, "../../web-sdk/package.json"))("playwright-core");
const { URL: url, KEY: key, CHROMIUM: program } = process.env;
const LIMIT_MS = 60_000;

const all = new Map();
const scenario = (name, run) => all.set(name, run);

/** The page in a context of its own, and what it asked for and complained of. */
async function open(browser, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(LIMIT_MS);
  const requests = [];
  const errors = [];
  page.on("request", (request) => requests.push(request));
  page.on("console", (message) => message.type() === "error" && !/status of 401/.test(message.text()) && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  await page.goto(`${url}/docs`);
  await page.waitForSelector(".opblock");
  return { context, page, requests, errors };
}

function isClean({ requests, errors }) {
  assert.deepEqual(errors, [], "nothing is refused by the page's policy, and nothing raises");
  const foreign = requests.map((request) => request.url()).filter((asked) => !asked.startsWith(`${url}/`) && !asked.startsWith("data:"));
  assert.deepEqual(foreign, [], "no other host is asked");
}

async function tryOut(page, method, path) {
  const operation = page.locator(`.opblock-${method}`, { has: page.locator(`[data-path="${path}"]`) });
  await operation.locator(".opblock-summary-control").click();
  await operation.getByRole("button", { name: "Try it out" }).click();
  return operation;
}

async function execute(operation) {
  const clear = operation.locator(".btn-clear"); // there once it has an answer, which would be read again
  if (await clear.count()) await clear.click();
  await operation.getByRole("button", { name: "Execute" }).click();
  const live = operation.locator(".live-responses-table");
  await live.waitFor();
  return [await live.locator(".response-col_status").last().innerText(), await live.locator(".highlight-code").first().innerText()];
}

async function authorize(page) {
  await page.locator(".scheme-container .authorize").click();
  await page.locator(".auth-container input").fill(key);
  await page.locator(".auth-btn-wrapper .authorize").click();
  await page.locator(".auth-btn-wrapper .btn-done").click();
}

scenario("it lists every route, with its tag, and asks no other host", async (browser) => {
  const tab = await open(browser);
  const described = (await (await tab.context.request.get(`${url}/openapi.json`)).json()).paths;
  const wanted = Object.entries(described).flatMap(([path, operations]) => Object.keys(operations).map((method) => `${method} ${path}`));
  const shown = await tab.page.$$eval(".opblock", (found) =>
    found.map((block) => `${block.querySelector(".opblock-summary-method").textContent.toLowerCase()} ${block.querySelector("[data-path]").dataset.path}`),
  );
  assert.deepEqual(shown.sort(), wanted.sort());
  const tags = new Set(Object.values(described).flatMap((operations) => Object.values(operations).flatMap(({ tags }) => tags)));
  assert.equal(await tab.page.locator(".opblock-tag").count(), tags.size);
  isClean(tab);
});

scenario("a key is asked for, and a request with it is answered", async (browser) => {
  const tab = await open(browser);
  const operation = await tryOut(tab.page, "get", "/v1/models");
  assert.match((await execute(operation))[0], /^401/);
  await authorize(tab.page);
  const [status, body] = await execute(operation);
  assert.match(status, /^200/);
  assert.match(body, /"object": "list"/);
  isClean(tab);
});

scenario("the example of a body works as it is", async (browser) => {
  const tab = await open(browser);
  await authorize(tab.page);
  const operation = await tryOut(tab.page, "post", "/tokenize");
  const [status, body] = await execute(operation);
  assert.match(status, /^200/);
  assert.match(body, /"count": 16/);
  isClean(tab);
});

scenario("schemas, examples and errors can be read", async (browser) => {
  const tab = await open(browser);
  // Those that take a body, which is what references are in: each block that is open costs the page a second.
  const blocks = tab.page.locator(".opblock-post .opblock-summary-control");
  for (const block of await blocks.all()) await block.evaluate((control) => control.click());
  const areOpen = (count) => document.querySelectorAll(".opblock.is-open .responses-table").length === count;
  await tab.page.waitForFunction(areOpen, await blocks.count());
  const text = await tab.page.locator("#api").innerText();
  for (const said of ["Over a limit; Retry-After says for how long.", "My cat is called Biscuit", "rate_limit_exceeded", "expected_arrival"]) {
    assert.ok(text.includes(said), said);
  }
  assert.ok(!text.includes("Could not resolve reference") && !text.includes("Unknown Type"), "every reference is resolved");
  isClean(tab);
});

scenario("the key is kept nowhere", async (browser) => {
  const tab = await open(browser);
  await authorize(tab.page);
  assert.deepEqual(await tab.page.evaluate(() => [localStorage.length, sessionStorage.length, document.cookie]), [0, 0, ""]);
  isClean(tab);
});

scenario("it fits a phone", async (browser) => {
  const tab = await open(browser, { viewport: { width: 390, height: 800 } });
  assert.ok((await tab.page.evaluate(() => document.documentElement.scrollWidth)) <= 390);
  isClean(tab);
});

const browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
for (const [name, run] of all) {
  let error = null;
  try {
    await run(browser);
  } catch (raised) {
    error = String(raised.stack ?? raised).slice(0, 2000);
  }
  console.log(JSON.stringify({ name, error }));
}
await browser.close();
