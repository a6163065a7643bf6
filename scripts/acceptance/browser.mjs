// The chat page in a headless Chromium, offline but for the server itself. LAPIDARY_URL names a running server,
// CHROMIUM the browser.

import assert from "node:assert/strict";

import { chromium } from "playwright-core";

const url = process.env.LAPIDARY_URL;
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const context = await browser.newContext();
const elsewhere = [];
await context.route("**", (route) => {
  if (route.request().url().startsWith(url)) return route.continue();
  elsewhere.push(route.request().url());
  return route.abort();
});
const page = await context.newPage();
const problems = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));

const last = () => page.locator(".message.assistant").last();
const ended = () => page.locator("#send").waitFor({ state: "visible" });
async function ask(text) {
  await page.fill("#input", text);
  await page.press("#input", "Enter");
}

await page.goto(url + "/");
assert.equal(await page.textContent("#model"), "lapidary");

// A greedy answer.
await page.click("#toggle");
await page.fill("#temperature", "0");
await ask("What is the capital of Kenya?");
await ended();
assert.equal(await last().locator(":scope > .text").textContent(), "The capital of Kenya is Nairobi.");
assert.match(await last().locator(".figures").textContent(), /^\d+ tokens, [\d.]+ tokens\/s$/);
assert.equal(await last().locator("details").isVisible(), false);

// Thoughts are folded and can be opened.
await page.click("#clear");
await page.check("#think");
await ask("What is the capital of Kenya?");
await ended();
const thoughts = last().locator("details");
assert.equal(await thoughts.getAttribute("open"), null);
await thoughts.locator("summary").click();
assert.match(await thoughts.innerText(), /Its capital is Nairobi/);
await page.uncheck("#think");

// A second turn knows the first.
assert.equal(await page.locator(".message").count(), 2);
await ask("What is the capital of Peru?");
await ended();
assert.equal(await page.locator(".message").count(), 4);
assert.match(await last().locator(":scope > .text").textContent(), /Lima/);

// Markup is text.
await ask("Repeat these words: <img src=x onerror=alert(1)>");
await ended();
assert.equal(await page.locator(".message img").count(), 0);

// Stopping keeps what was said; the page goes on.
await page.click("#clear");
await page.fill("#temperature", "");
await ask("Tell me a story about Zoe.");
await last().locator(":scope > .text").filter({ hasText: /\S/ }).waitFor();
if (await page.locator("#stop").isVisible()) {
  await page.click("#stop").catch(() => {});
}
await ended();
await ask("What does a duck say?");
await ended();
assert.match(await last().locator(":scope > .text").textContent(), /\S/);
assert.deepEqual(problems, []);

// An error is shown.
await page.fill("#temperature", "-1");
await ask("x");
await page.locator(".error").waitFor();
assert.match(await page.locator(".error").textContent(), /temperature/);

assert.deepEqual(elsewhere, []);
await browser.close();
console.log("browser: passed");
