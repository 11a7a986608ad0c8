"""OpenAI's Responses API over the gateway's chats: translations, events, and stored responses."""
