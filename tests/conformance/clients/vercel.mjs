// Vercel's ai over @ai-sdk/openai (Responses and chat), @ai-sdk/openai-compatible and @ai-sdk/anthropic. The features are those of features.py.
import { readFileSync } from 'node:fs'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [url, name, ...only] = process.argv.slice(2)
const baseURL = `${url}/v1`
const openai = createOpenAI({ baseURL, apiKey: 'none' })
const compatible = createOpenAICompatible({ name: 'compatible', baseURL, apiKey: 'none', supportsStructuredOutputs: true })
const anthropic = createAnthropic({ baseURL, apiKey: 'none' })
const chats = [compatible(name), openai.chat(name)]
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) })
const called = []
const tools = {
  weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.enum(['Oslo', 'Rome']) }),
    execute: async ({ city }) => (called.push(city), `Rain in ${city}.`),
  }),
}
const greeting = { prompt: 'Say hello.', maxOutputTokens: 16, maxRetries: 0, temperature: 0 }
const question = { prompt: 'What is the weather in Oslo? Use the tool.', maxOutputTokens: 100, maxRetries: 0, temperature: 0, tools }
const personRequest = { prompt: 'Write a person as JSON: name Ann, age 30.', maxOutputTokens: 64, maxRetries: 0, temperature: 0, output: person }

function check(value, what) {
  if (!value) throw new Error(what)
}

async function chat(model) {
  check((await generateText({ model, ...greeting })).text, 'no text')
}

async function stream(model) {
  let error
  const answer = streamText({ model, ...greeting, onError: (event) => (error = event.error) })
  let text = ''
  for await (const part of answer.textStream) text += part
  if (error) throw error
  check(text && ['stop', 'length'].includes(await answer.finishReason), `ended with ${await answer.finishReason}`)
}

async function forced(model) {
  const answer = await generateText({ model, ...question, toolChoice: { type: 'tool', toolName: 'weather' } })
  check(answer.toolCalls[0]?.input.city, answer.text)
}

async function auto(model) {
  const answer = await generateText({ model, ...question })
  check(answer.toolCalls.length, answer.text)
}

async function structured(model) {
  check((await generateText({ model, ...personRequest })).output.name, 'no object')
}

async function agent(model) {
  called.length = 0
  const answer = await generateText({ model, ...question, stopWhen: stepCountIs(3) })
  check(called.length, answer.text)
}

async function all(model, ...checks) {
  for (const check of checks) await check(model)
}

const features = {
  chat: () => Promise.all(chats.map(chat)),
  stream: () => Promise.all(chats.map(stream)),
  'tools forced': () => Promise.all(chats.map(forced)),
  'tools auto': () => Promise.all(chats.map(auto)),
  structured: () => Promise.all(chats.map(structured)),
  responses: () => all(openai(name), chat, stream, forced, structured),
  messages: () => all(anthropic(name), chat, stream, forced, structured),
  'agent run': () => agent(compatible(name)),
}
const found = {}
for (const [feature, run] of Object.entries(features)) {
  if (only.length && !only.includes(feature)) continue
  found[feature] = await run().then(() => 'yes', (error) => `${error.name}: ${error.message}`)
}
const packages = ['ai', '@ai-sdk/openai', '@ai-sdk/openai-compatible', '@ai-sdk/anthropic']
const version = (key) => JSON.parse(readFileSync(`node_modules/${key}/package.json`)).version
console.log(JSON.stringify({ client: packages.map((key) => `${key} ${version(key)}`).join(', '), features: found }))
